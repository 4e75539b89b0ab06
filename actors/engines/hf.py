"""The transformers engine: slower than vLLM, runs everywhere, and the reference that vLLM's states are compared with."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from actors.engines.base import Answer, Captured, EngineSettings
from actors.errors import ActorError
from corpus.answers import LENGTH, STOP


class HfEngine:
    """One row a forward pass, so that a row's states cannot depend on its neighbours."""

    def __init__(self, settings: EngineSettings) -> None:
        from transformers import AutoModelForCausalLM

        self.layer_ids, self.max_length, self.answers = settings.layer_ids, settings.max_length, settings.answers
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
        self.model = model.to(self.device).eval()
        self._last: torch.Tensor | None = None
        # The states before the final norm are what enters it: `hidden_states[-1]` of transformers is already normed.
        self.model.get_decoder().norm.register_forward_pre_hook(self._keep_last)

    def _keep_last(self, _module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self._last = arguments[0]

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Sequence[int]]) -> list[Captured]:
        if (longest := max(map(len, rows), default=0)) > self.max_length:
            raise ActorError(f"a row of {longest} tokens is longer than this engine's limit of {self.max_length}")
        return [self._one(row) for row in rows]

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Answer, Captured]]:
        """A prompt's answer depends on its tokens and the seed alone, so that it is the same in every batch and at every attempt."""
        for index, prompt in enumerate(prompts):
            answer = self._generate(list(prompt))
            yield index, answer, self._one([*prompt, *answer.token_ids[:-1]])

    def _generate(self, prompt: list[int]) -> Answer:
        from transformers import GenerationConfig

        answers = self.answers
        if answers is None:
            raise ActorError("this engine was started without settings for answers (EngineSettings.answers)")
        torch.manual_seed(zlib.crc32(np.asarray([answers.seed, *prompt], np.int64).tobytes()))
        stops = sorted(answers.stop_token_ids)
        how: dict[str, Any] = {"do_sample": False}
        if answers.temperature:
            how = {"do_sample": True, "temperature": answers.temperature, "top_p": answers.top_p, "top_k": answers.top_k}
            how["min_p"] = answers.min_p or None
        limit = min(answers.max_new_tokens, self.max_length - len(prompt))
        config = GenerationConfig(max_new_tokens=limit, eos_token_id=stops, pad_token_id=stops[0], **how)
        ids = torch.tensor([prompt], device=self.device)
        made = self.model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist()
        return Answer(made, STOP if made[-1] in stops else LENGTH)

    def _one(self, row: Sequence[int]) -> Captured:
        ids = torch.tensor([list(row)], device=self.device)
        states = self.model(input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        assert self._last is not None  # the hook ran: every decoder calls its norm
        context = torch.stack([states[layer + 1][0] for layer in self.layer_ids])
        return Captured(context=context.cpu(), last_hidden=self._last[0].cpu())
