"""vLLM as target engine: hidden states of given rows, and answers to prompts.

Both run vLLM inside the calling process (a Ray actor). `vllm_environment` must be in that process's environment before vLLM is imported.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.engines.base import Answer, AnswerSettings, Captured, EngineSettings, finished_answer
from actors.engines.model_files import offline_environment
from actors.errors import ActorError


def vllm_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment of a process that holds a vLLM engine.

    One OpenMP thread a process by default: two processes whose threads spin on the same cores slow each other down many times over.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **offline_environment(settings.model),
    }


def make_llm(settings: EngineSettings, enable_prefix_caching: bool = False, **extra: Any) -> Any:
    """An engine of vLLM's in this process.

    Args:
        enable_prefix_caching: never where states are captured: a cached prefix belongs to another request, so its states would not be
            computed for this one.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise ActorError(f"vLLM cannot be imported ({error}). Run `python -m pipelines.doctor`, or use `engine=hf`.") from error
    dtype: Any = settings.dtype
    return LLM(
        model=settings.model,
        dtype=dtype,
        max_num_seqs=settings.batch_rows,
        tensor_parallel_size=settings.tensor_parallel,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=True,
        disable_log_stats=True,
        **extra,
    )


class VllmPrefillEngine:
    """Captures through vLLM's own `extract_hidden_states` and our connector."""

    def __init__(self, settings: EngineSettings) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(settings.model).get_text_config()
        # vLLM id k is the residual stream after k layers; N, after all, is before the final norm.
        self.layer_ids = settings.layer_ids
        ids = sorted({layer + 1 for layer in settings.layer_ids} | {config.num_hidden_layers})
        self.plane_of = {vllm_id - 1: plane for plane, vllm_id in enumerate(ids)}
        self.last_plane = len(ids) - 1
        self.max_length, self.answers, self._next = settings.max_length, settings.answers, 0
        if "Gemma3ForCausalLM" in (config.architectures or ()):
            from actors.engines import gemma3_vllm

            gemma3_vllm.register()
        self.llm = make_llm(
            settings,
            # One more than the longest row: a request always generates a token.
            max_model_len=settings.max_length + 1,
            max_num_batched_tokens=max(settings.batch_tokens, settings.batch_rows),
            seed=settings.answers.seed if settings.answers else 0,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            },
            kv_transfer_config={
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": "actors.engines.hidden_states_connector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": "/dev/shm", "use_synchronization_lock": True},
            },
        )

    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(row)) for row in rows]
        outputs = self.llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), use_tqdm=False)
        self._drain()
        return [self._take(output, row) for output, row in zip(outputs, rows, strict=True)]

    def answer(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Answer, Captured]]:
        from vllm.inputs import TokensPrompt

        engine, index_of, waiting = self.llm.llm_engine, dict[str, int](), list[Any]()
        for index, prompt in enumerate(prompts):
            request, self._next = f"row-{self._next}", self._next + 1
            index_of[request] = index
            engine.add_request(request, TokensPrompt(prompt_token_ids=list(prompt)), self._sampling(len(prompt)))

        def taken(output: Any) -> tuple[int, Answer, Captured]:
            index, done = index_of[output.request_id], output.outputs[0]
            answer = finished_answer(done.token_ids, str(done.finish_reason))
            return index, answer, self._take(output, [*prompts[index], *answer.token_ids[:-1]])

        while engine.has_unfinished_requests():
            waiting += [output for output in engine.step() if output.finished]
            # A request's states come a step after its last token.
            arrived = [output for output in waiting if self._arrived(output)]
            waiting = [output for output in waiting if output not in arrived]
            yield from map(taken, arrived)
        self._drain()
        yield from map(taken, waiting)

    def _sampling(self, prompt_length: int) -> Any:
        from vllm import SamplingParams

        answers = self.answers
        if answers is None:
            raise ActorError("this engine was started without settings for answers (EngineSettings.answers)")
        return SamplingParams(
            temperature=answers.temperature,
            top_p=answers.top_p,
            top_k=answers.top_k,
            min_p=answers.min_p,
            max_tokens=min(answers.max_new_tokens, self.max_length - prompt_length),
            stop_token_ids=sorted(answers.stop_token_ids),
            ignore_eos=False,
            detokenize=False,
            extra_args={"kv_transfer_params": {"include_output_tokens": True}},
        )

    @staticmethod
    def _arrived(output: Any) -> bool:
        from actors.engines.hidden_states_connector import TAKEN

        key = output.kv_transfer_params["hidden_states_path"]
        return key in TAKEN or Path(key).exists()

    def _drain(self) -> None:
        """Step until the connector has handed over the last request: `generate` returns before that."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def _take(self, output: Any, row: Sequence[int]) -> Captured:
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import cleanup_hidden_states, load_hidden_states

        from actors.engines.hidden_states_connector import TAKEN

        key = output.kv_transfer_params["hidden_states_path"]
        if key in TAKEN:
            ids, states = TAKEN.pop(key)
        else:
            loaded = load_hidden_states(key)
            cleanup_hidden_states(key)
            ids, states = loaded["token_ids"], loaded["hidden_states"]
        # Identity is checked per request: states of another request's tokens are the classic silent fault here.
        if ids.tolist() != list(row):
            raise ActorError(
                f"vLLM returned the hidden states of other tokens for request {output.request_id}: capture is not to be trusted"
            )
        planes = states.movedim(1, 0)
        context = planes[[self.plane_of[layer] for layer in self.layer_ids]]
        return Captured(context=context, last_hidden=planes[self.last_plane])


class VllmAnswerEngine:
    """Generates answers in this process; see `AnswerEngine`."""

    def __init__(self, settings: EngineSettings, answers: AnswerSettings) -> None:
        self.llm = make_llm(
            settings,
            max_model_len=settings.max_length,
            max_num_batched_tokens=max(settings.batch_tokens, settings.max_length),
            seed=answers.seed,
        )
        import vllm

        self.name = f"vLLM {vllm.__version__}, {settings.dtype}"
        self.max_length = settings.max_length
        self.sampling = vllm.SamplingParams(
            temperature=answers.temperature,
            top_p=answers.top_p,
            top_k=answers.top_k,
            min_p=answers.min_p,
            max_tokens=answers.max_new_tokens,
            stop_token_ids=sorted(answers.stop_token_ids),
            # Whatever the model's generation config recommends is in our conf already, where a person can see it.
            ignore_eos=False,
            detokenize=False,
        )
        self._key_of: dict[str, int] = {}
        self._asked = 0

    def ask(self, key: int, prompt: Sequence[int]) -> None:
        from vllm.inputs import TokensPrompt

        request, self._asked = f"answer-{self._asked}", self._asked + 1
        self._key_of[request] = key
        self.llm.llm_engine.add_request(request, TokensPrompt(prompt_token_ids=list(prompt)), self.sampling)

    def answers(self) -> Iterator[tuple[int, Answer]]:
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done = output.outputs[0]
                    yield self._key_of.pop(output.request_id), finished_answer(done.token_ids, str(done.finish_reason))

    def close(self) -> None:
        self.llm.llm_engine.abort_request(list(self._key_of))
