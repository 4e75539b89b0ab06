"""Tiny targets and drafters for the decoding tests, and plain Hugging Face decoding as the reference."""

from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from drafters.config import config_from_target
from drafters.drafter import Drafter
from drafters.family import family_of
from drafters.target_head import TargetHead

FAMILIES = ["llama", "qwen3", "gemma3"]
DRAFTERS = ["none", "markov", "gated", "rnn", "zlab", "eagle3", "eagle3 small", "mtp1"]
LAYERS = (-1, 0, 2)
VOCAB = 53
HIDDEN = 32
PROMPTS = [[7, 3, 9, 1], [5], [11, 2, 2, 40, 8, 19, 33, 6, 21], [30, 31], [4, 4, 17, 29, 50, 12]]


@lru_cache
def tiny_model(family: str, vocab: int = VOCAB, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
    """A random model of the family; wide initial weights, so that its greedy text does not settle on one token."""
    shape = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": attention,
    }
    torch.manual_seed(5)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:  # a window shorter than the text, and a softcap
        kinds = ["sliding_attention", "full_attention"] * 2
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(**shape, query_pre_attn_scalar=8, sliding_window=5, layer_types=kinds, final_logit_softcapping=20.0)
        )
    return model.to(dtype).eval()


@lru_cache
def greedy_reference(family: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """Plain greedy continuation by Hugging Face, one prompt at a time."""
    ids = torch.tensor([prompt])
    out = tiny_model(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


class ScriptCache:
    """Which request sits in which row, kept where a drafter keeps its keys, and the features it was given."""

    def __init__(self, requests: list[int]) -> None:
        self.lengths = torch.zeros(len(requests), dtype=torch.int64)
        self.keys: list[Tensor] = [torch.tensor(requests)]
        self.features: list[list[Tensor]] = [[] for _ in requests]

    def select(self, rows) -> None:
        self.keys, self.lengths = [self.keys[0][list(rows)]], self.lengths[list(rows)]

    @property
    def requests(self) -> list[int]:
        return self.keys[0].tolist()


class ScriptedDrafter:
    """Drafts what a function of (request, position) says, with the given certainty; no head, no confidence unless asked for.

    A request is the place of its prompt in one batch, `prompts`; the decoder's first slot is that of the longest. In batches of another
    size it is the slot.
    """

    def __init__(
        self, script, block_length: int = 4, vocab: int = VOCAB, confidence: bool = False, sharpness: float = 6.0, prompts=PROMPTS
    ) -> None:
        self.script, self.vocab, self.sharpness = script, vocab, sharpness
        self.order = sorted(range(len(prompts)), key=lambda request: -len(prompts[request]))
        sizes = {"hidden_size": HIDDEN, "vocab_size": vocab, "captured_layers": len(LAYERS)}
        self.config = SimpleNamespace(block_length=block_length, chain=False, **sizes)
        self.head = None
        self.confidence = object() if confidence else None
        self.caches: list[ScriptCache] = []

    def new_cache(self, batch_size: int, max_length: int) -> ScriptCache:
        self.caches.append(ScriptCache(self.order if len(self.order) == batch_size else list(range(batch_size))))
        return self.caches[-1]

    def extend_context(self, cache: ScriptCache, features: Tensor, counts: Tensor, tokens: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            cache.features[cache.requests[row]].append(features[row, :count].clone())
        cache.lengths = cache.lengths + counts

    def block_hidden(self, cache: ScriptCache, anchor_tokens: Tensor, anchor_positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        # The context holds exactly the positions before the anchor.
        assert cache.lengths.tolist() == anchor_positions.tolist()
        tokens = [
            [self.script(request, position + 1 + k) for k in range(self.config.block_length)]
            for request, position in zip(cache.requests, anchor_positions.tolist(), strict=True)
        ]
        return torch.nn.functional.one_hot(torch.tensor(tokens), self.vocab).double()

    def base_logits(self, hidden: Tensor) -> Tensor:
        return self.sharpness * hidden

    def confidence_logit(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return previous.double() / 10


def tiny_drafter(family: str, kind: str = "markov", block_length: int = 4, vocab: int = VOCAB, **options) -> Drafter:
    """An untrained drafter of the tiny target, in float64, with weights large enough to matter.

    Its kind is one of DRAFTERS: a DSpark head, "zlab" (DFlash in that layout), or an algorithm.
    """
    model = tiny_model(family, vocab)
    target = family_of(model.config.to_dict())
    weights = (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight)
    target_head = TargetHead(vocab, HIDDEN, model.config.rms_norm_eps, target, torch.float64).load(*weights)
    values = {"block_length": block_length, "mask_token_id": 0}
    if kind in ("eagle3", "mtp1"):
        values |= {"algorithm": kind, "block_length": 1 if kind == "mtp1" else block_length}
    elif kind == "eagle3 small":
        values |= {"algorithm": "eagle3", "draft_vocabulary": tuple(range(1, vocab, 2))}
    elif kind == "zlab":
        values |= {"algorithm": "dflash", "layout": "zlab", "num_layers": 2}
    else:
        values |= {"num_layers": 2, "head": kind, "head_rank": 0 if kind == "none" else 6}
    config = config_from_target(model.config.to_dict(), len(LAYERS), **values, **options)
    torch.manual_seed(1)
    drafter = Drafter(config, target_head)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    return drafter.eval()


def chi_square_p(observed: Tensor, probabilities: Tensor) -> float:
    """P-value of Pearson's test; cells that expect fewer than 5 are put together."""
    expected = probabilities.double().flatten() * observed.sum()
    observed = observed.double().flatten()
    small = expected < 5
    if small.any():
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    if (observed[~keep] > 0).any():
        return 0.0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    return float(torch.special.gammaincc((keep.sum() - 1).double() / 2, statistic / 2))
