"""The target's embedding, final norm and LM head: shared by every drafter, frozen, never random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.errors import DrafterError
from drafters.family import TargetFamily
from drafters.norm import rms_norm
from drafters.precision import project


class TargetHead(nn.Module):
    """From token ids to embeddings, and from hidden states to the target's logits.

    Buffers hold NaN until `load` fills them, so that a forgotten load cannot pass for a model; they never enter a state_dict.
    `dtype` decides the precision of everything built on this head: bfloat16 means products with bf16 operands and float32 results
    (and float32 master weights in the drafter), float32 and float64 mean exactly that.
    """

    embedding: Tensor
    final_norm: Tensor
    lm_head: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, eps: float, family: TargetFamily, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise DrafterError(f"a target head computes in bfloat16, float32 or float64, not {dtype}")
        self.vocab_size, self.hidden_size, self.eps, self.family = vocab_size, hidden_size, eps, family
        self.loaded = False
        nan = torch.full((1, 1), float("nan"), dtype=dtype)
        # Expanded NaNs take no memory, whatever the vocabulary.
        self.register_buffer("embedding", nan.expand(vocab_size, hidden_size), persistent=False)
        self.register_buffer("lm_head", nan.expand(vocab_size, hidden_size), persistent=False)
        self.register_buffer("final_norm", torch.full((hidden_size,), float("nan"), dtype=self.master_dtype), persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """bfloat16, float32 or float64: operands of matrix products."""
        return self.embedding.dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of activations, results and the drafter's weights: float32, or float64 where that is computed in."""
        return torch.float64 if self.embedding.dtype == torch.float64 else torch.float32

    def load(self, embedding: Tensor, final_norm: Tensor, lm_head: Tensor) -> TargetHead:
        """Take over the target's tensors (embedding [V, H], final_norm [H] as stored, lm_head [V, H]; tied ones may be one tensor).

        Raises:
            DrafterError: on a wrong shape or a value that is not finite, all of them listed.
        """
        wide = (self.vocab_size, self.hidden_size)
        problems = []
        for name, tensor, shape in (
            ("embedding", embedding, wide),
            ("final_norm", final_norm, (self.hidden_size,)),
            ("lm_head", lm_head, wide),
        ):
            if tuple(tensor.shape) != shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
            elif not tensor.is_meta and not bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
                problems.append(f"{name} holds values that are not finite")
        if problems:
            raise DrafterError("target head: " + "; ".join(problems))
        device, dtype = self.embedding.device, self.compute_dtype
        tied = embedding.data_ptr() == lm_head.data_ptr()
        self.embedding = embedding.detach().to(device, dtype).contiguous()
        self.lm_head = self.embedding if tied else lm_head.detach().to(device, dtype).contiguous()
        self.final_norm = final_norm.detach().to(device, self.master_dtype)
        self.loaded = True
        return self

    def norm_weight(self) -> Tensor:
        """[H] what the final norm multiplies by, the family's (1 + w) folded in."""
        self.require_loaded()
        return self.final_norm + 1 if self.family.norm_plus_one else self.final_norm

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H] in the master dtype, scaled as the family does."""
        self.require_loaded()
        rows = F.embedding(ids, self.embedding)
        if self.family.embedding_scale != 1.0:
            # A tensor of the embedding's dtype: the released Gemma code rounds the factor like this.
            rows = rows * torch.tensor(self.family.embedding_scale, dtype=rows.dtype, device=rows.device)
        return rows.to(self.master_dtype)

    def normed(self, last_hidden: Tensor) -> Tensor:
        """Last hidden states before the final norm [..., H] -> after it, in the master dtype."""
        return rms_norm(last_hidden.to(self.master_dtype), self.norm_weight(), self.eps)

    def logits(self, hidden: Tensor, normed: bool = False) -> Tensor:
        """Hidden states [..., H], before the final norm or after it (`normed`), -> logits [..., V], multiplier and softcap applied.

        No gradient.
        """
        hidden = hidden.to(self.master_dtype) if normed else self.normed(hidden)
        self.require_loaded()
        flat = project(hidden.detach().reshape(-1, self.hidden_size), self.lm_head)
        return self.shape_logits_(flat).view(*hidden.shape[:-1], self.vocab_size)

    def shape_logits_(self, logits: Tensor) -> Tensor:
        """Apply the family's multiplier and softcap in place."""
        if self.family.logit_multiplier != 1.0:
            logits.mul_(self.family.logit_multiplier)
        cap = self.family.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def require_loaded(self) -> None:
        """Raise a DrafterError while the buffers are still NaN."""
        if not self.loaded:
            raise DrafterError("the target head has no weights yet; call TargetHead.load with the target's tensors")
