"""The target model: batches of requests of different lengths, captured hidden states, logits only where they are wanted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.cache import RaggedCache
from decoding.errors import DecodingError
from decoding.ragged import RaggedRows, neighbours, ragged_attention
from drafters.config import DrafterConfig
from drafters.errors import DrafterError
from drafters.family import TargetFamily, family_of

_MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class TargetStates:
    """What one forward pass gives; entries past a request's count are padding.

    Attributes:
        hidden: [B, Q, H] last hidden states after the final norm, the LM head's input.
        features: [B, Q, L*H] residual streams after the captured layers, side by side in layer order, or [B, Q, H] the last hidden states
            before the final norm; None where none were asked for.
    """

    hidden: Tensor
    features: Tensor | None


class TransformersTarget:
    """A Hugging Face causal LM (Llama, Qwen3, Gemma3 types) that decodes requests of different lengths together."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int] = (), last_hidden: bool = False) -> None:
        """Wrap a loaded model; it is put in eval mode and otherwise left as it is.

        Args:
            model: with `sdpa` or `eager` attention, in float32, bfloat16 or float64.
            layer_ids: captured decoder layers, 0-based and ascending; id k gives HF's hidden_states[k + 1], -1 the embedding output.
                The final layer is refused, since HF gives it normed.
            last_hidden: capture the last hidden state before the final norm instead (what MTP-1 reads).

        Raises:
            DecodingError: for an unknown family, for layer ids the model lacks, for an attention without explicit masks, for a layer type
                other than full or sliding attention, and for a model whose own logits differ from what this class computes.
        """
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.layer_ids, self._last_hidden = tuple(layer_ids), last_hidden
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._family = _family(model)
        self._windows = _attention_windows(self.config)
        self._check_layers()
        if self.config._attn_implementation not in _MASKED_ATTENTION:
            raise DecodingError(
                f"The target uses {self.config._attn_implementation!r} attention, which takes no mask per request. "
                f"Load it with attn_implementation='sdpa'."
            )
        self._check_against_model()

    @classmethod
    def for_drafter(cls, model: PreTrainedModel, layer_ids: Sequence[int], config: DrafterConfig) -> "TransformersTarget":
        """Capturing what a drafter of this configuration reads: its contract's layers, or the last hidden state."""
        if config.kind.context == "last_hidden":
            return cls(model, last_hidden=True)
        return cls(model, layer_ids)

    @property
    def captured_states(self) -> int:
        """States of H numbers captured at each position."""
        return 1 if self._last_hidden else len(self.layer_ids)

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head, padding rows included."""
        return self._head.weight.shape[0]

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for."""
        return self.config.max_position_embeddings

    def new_cache(self, batch_size: int, max_length: int) -> RaggedCache:
        """Return an empty cache for `batch_size` requests of at most `max_length` positions, padding of the last pass included."""
        return RaggedCache(batch_size, max_length, self.device)

    @torch.inference_mode()
    def forward(self, cache: RaggedCache, tokens: Tensor, counts: Tensor, capture: bool = True) -> TargetStates:
        """Append tokens to every request and run them through the model.

        Args:
            cache: its lengths grow by `counts`; take tokens back with `cache.truncate`.
            tokens: [B, Q] int64, right-padded with any valid id.
            counts: [B] int64, how many of them are real (0 to Q).
            capture: whether to collect the context features.

        Raises:
            DecodingError: where the padded block does not fit into the cache.
        """
        width = tokens.shape[1]
        keys = cache.lengths.cpu().numpy() + width
        span = int(keys.max())
        if span > cache.max_length:
            raise DecodingError(f"A pass reaches position {span}, the cache has room for {cache.max_length}. Ask new_cache for more.")
        positions = cache.lengths[:, None] + torch.arange(width, device=tokens.device)
        masks, more = self._masks(positions, span), dict[str, Any]()
        ragged = None
        if self.config._attn_implementation == "sdpa":
            more["parts"] = neighbours(keys)
            ragged = RaggedRows.of(counts, width) if width > 1 else None
        with self._captured(capture) as streams, ragged_attention(self.config):
            if ragged is None or len(ragged.rows) == tokens.numel():
                cache.begin(positions, span)
                out = self._decoder(tokens, attention_mask=masks, position_ids=positions, past_key_values=cache, use_cache=True, **more)
                hidden, features = out.last_hidden_state, streams
            else:
                cache.begin(positions, span, ragged)
                out = self._decoder(
                    ragged.pack(tokens),
                    attention_mask=masks,
                    position_ids=ragged.pack(positions),
                    past_key_values=cache,
                    use_cache=True,
                    ragged=ragged,
                    **more,
                )
                hidden, features = ragged.pad(out.last_hidden_state), [ragged.pad(stream) for stream in streams]
        cache.lengths = cache.lengths + counts
        return TargetStates(hidden, torch.cat(features, dim=-1) if features else None)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits [..., V] for last hidden states [..., H] as given by `forward`."""
        logits = self._head(hidden)
        if self._family.logit_multiplier != 1:
            logits = logits * self._family.logit_multiplier
        if self._family.logit_softcap is not None:
            logits = torch.tanh(logits / self._family.logit_softcap) * self._family.logit_softcap
        return logits

    def _masks(self, positions: Tensor, span: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, Q, span]: each query sees its own request's positions up to itself, within the layer's window."""
        keys = torch.arange(span, device=positions.device)
        queries = positions[:, None, :, None]
        masks = {}
        for kind, window in self._windows.items():
            seen = keys <= queries
            if window is not None:
                seen = seen & (keys > queries - window)
            masks[kind] = torch.zeros(seen.shape, dtype=self.dtype, device=keys.device).masked_fill_(~seen, float("-inf"))
        # Models whose layers differ in kind take a mask for each kind.
        return masks if getattr(self.config, "layer_types", None) else masks["full_attention"]

    @contextmanager
    def _captured(self, capture: bool) -> Iterator[list[Tensor]]:
        """Collect the residual streams after the captured layers, for the length of one pass.

        Hooks rather than output_hidden_states, which would keep every layer's states of a long prompt alive.
        """
        streams: list[Tensor] = []
        layers = (self.config.num_hidden_layers - 1,) if self._last_hidden else self.layer_ids
        hooks = [self._hook(layer, streams) for layer in layers] if capture else []
        try:
            yield streams
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, layer: int, streams: list[Tensor]) -> Any:
        if layer == -1:
            return self._decoder.layers[0].register_forward_pre_hook(lambda module, args: streams.append(args[0]))
        after: Callable[..., None] = lambda module, args, output: streams.append(output if isinstance(output, Tensor) else output[0])  # noqa: E731
        return self._decoder.layers[layer].register_forward_hook(after)

    def _check_layers(self) -> None:
        last = self.config.num_hidden_layers - 1
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise DecodingError(f"Captured layers {list(self.layer_ids)} must ascend without repeats.")
        for layer in self.layer_ids:
            if not -1 <= layer < last:
                raise DecodingError(
                    f"Captured layer {layer} is outside -1..{last - 1} for a target of {last + 1} layers "
                    f"(0-based, -1 = embedding output; the final layer is not allowed, since it is only available normed)."
                )

    def _check_against_model(self) -> None:
        """Refuse a model that does more between its hidden states and its logits than we know of, or masks in another way.

        Decoding such a model by `forward` and `logits` would be exact for a distribution that is not the target's.
        """
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        with torch.inference_mode():
            own = self.model(input_ids=ids, use_cache=False).logits.double()
            states = self.forward(self.new_cache(1, 8), ids, torch.tensor([8], device=self.device), capture=False)
            ours = self.logits(states.hidden).double()
        tolerance = 0.05 if self.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if float((own - ours).abs().max()) > tolerance * max(float(own.abs().max()), 1e-6):
            raise DecodingError(
                f"{type(self.model).__name__} computes other logits than its final norm and LM head give: "
                f"it is of a type not supported for decoding."
            )


def _family(model: PreTrainedModel) -> TargetFamily:
    try:
        return family_of(model.config.to_dict())
    except DrafterError as error:
        raise DecodingError(f"{type(model).__name__} cannot be decoded with: {error}") from error


def _attention_windows(config: Any) -> dict[str, int | None]:
    """Return the kinds of attention layer the model has, with their window in positions (None: unbounded).

    Raises:
        DecodingError: for a kind other than full or sliding attention.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {"full_attention": window}  # one kind for all layers, as in Llama (no window) and Mistral
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise DecodingError(f"The target has layers of type {', '.join(unknown)}; only full_attention and sliding_attention are supported.")
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}
