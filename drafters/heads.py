"""Sequential heads: a low-rank bias on the next-token logits that knows the token just drafted (DSpark paper, section 3.2).

Every head gives a latent m [..., r] with bias B = m W2, from the slots' hidden states h and the previous tokens: all slots at once in
training (`latent`), one slot at a time when drafting (`begin`, `step`). Both give the same numbers for the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.errors import DrafterError
from drafters.precision import Linear, bf16_operands


class SequentialHead(nn.Module):
    """What the heads share: W1 [V, r] (an embedding of the previous token) and W2 [r, V]."""

    def __init__(self, config: DrafterConfig, bf16: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self.bf16 = config.head_rank, bf16
        self.W1 = nn.Embedding(config.vocab_size, config.head_rank, dtype=dtype)
        self.W2 = nn.Parameter(torch.empty(config.head_rank, config.vocab_size, dtype=dtype))
        nn.init.normal_(self.W1.weight, std=0.02)
        nn.init.normal_(self.W2, std=0.02)

    def embed(self, previous: Tensor) -> Tensor:
        """W1's rows of the previous tokens, [...] -> [..., r]."""
        return self.W1(previous)

    def latent(self, h: Tensor, previous: Tensor) -> Tensor:
        """h [..., g, H], previous tokens [..., g] -> m [..., g, r]."""
        return self.latent_of(h, self.embed(previous))

    def latent_of(self, h: Tensor, embedded: Tensor) -> Tensor:
        """As `latent`, from W1's rows [..., g, r] (which the confidence head shares)."""
        raise NotImplementedError

    def begin(self, batch_size: int) -> Tensor:
        """State before the first slot, [B, r]; heads without memory ignore it."""
        return self.W2.new_zeros(batch_size, self.rank)

    def step(self, h_k: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: h_k [B, H], previous [B], state -> (m [B, r], new state)."""
        return self.latent(h_k[:, None], previous[:, None])[:, 0], state

    @torch.no_grad()
    def start_from(self, next_hidden: Tensor, lm_head: Tensor, frequency: Tensor) -> None:
        """Start as what the target itself says after each single token, instead of at random.

        Args:
            next_hidden: [V, H], for each token the target's hidden state after it, as it enters the LM head.
            lm_head: [V, H].
            frequency: [V] how often each token comes up; common ones are met best.

        Raises:
            DrafterError: this head's bias is not linear in W1[prev], or its rank exceeds H.
        """
        raise DrafterError(f"a {type(self).__name__} cannot start from the target's logits; start it at random (train.head_start=random)")

    def hold_bf16(self) -> None:
        """Keep W2 in bf16, column by column in memory: a product with few rows reads it fastest so."""
        self.W2.data = self.W2.data.t().to(torch.bfloat16, memory_format=torch.contiguous_format).t()

    def bias(self, m: Tensor) -> Tensor:
        """B = m W2, [..., r] -> [..., V]."""
        if not self.bf16:
            return m @ self.W2
        if self.W2.dtype == torch.bfloat16:
            return (m.bfloat16() @ self.W2).to(m.dtype)
        if m.device.type != "cpu":
            return (m.bfloat16() @ self.W2.bfloat16()).to(m.dtype)
        with bf16_operands():
            return m @ self.W2


class MarkovHead(SequentialHead):
    """m = W1[prev]."""

    @torch.no_grad()
    def start_from(self, next_hidden: Tensor, lm_head: Tensor, frequency: Tensor) -> None:
        """See SequentialHead: B = the target's logits after prev alone, to rank r."""
        rows, columns = low_rank_logits(next_hidden, lm_head, self.rank, frequency)
        self.W1.weight.copy_(rows)
        self.W2.copy_(columns)

    def latent_of(self, h: Tensor, embedded: Tensor) -> Tensor:
        return embedded


class GatedHead(SequentialHead):
    """m = sigmoid(Wgate [h; W1[prev]] + b) * W1[prev]."""

    def __init__(self, config: DrafterConfig, bf16: bool, dtype: torch.dtype) -> None:
        super().__init__(config, bf16, dtype)
        self.gate = Linear(config.hidden_size + config.head_rank, config.head_rank, bias=True, bf16=bf16, dtype=dtype)
        _init_linear(self.gate)

    def latent_of(self, h: Tensor, embedded: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(torch.cat([h, embedded], dim=-1))) * embedded


class RnnHead(SequentialHead):
    """(gate, candidate, output) = W [s; W1[prev]; h] + b; s' = sig(gate) s + (1 - sig(gate)) tanh(candidate); m = tanh(output); s_0 = 0."""

    def __init__(self, config: DrafterConfig, bf16: bool, dtype: torch.dtype) -> None:
        super().__init__(config, bf16, dtype)
        self.joint = Linear(config.hidden_size + 2 * config.head_rank, 3 * config.head_rank, bias=True, bf16=bf16, dtype=dtype)
        _init_linear(self.joint)

    def latent_of(self, h: Tensor, embedded: Tensor) -> Tensor:
        state = embedded.new_zeros(embedded.shape[:-2] + embedded.shape[-1:])
        latents = []
        for k in range(h.shape[-2]):
            m, state = self._advance(h[..., k, :], embedded[..., k, :], state)
            latents.append(m)
        return torch.stack(latents, dim=-2)

    def step(self, h_k: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self._advance(h_k, self.embed(previous), state)

    def _advance(self, h_k: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint(torch.cat([state, embedded, h_k], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)


def make_head(config: DrafterConfig, bf16: bool, dtype: torch.dtype) -> SequentialHead | None:
    """The head that the configuration names, None for "none"."""
    kinds = {"markov": MarkovHead, "gated": GatedHead, "rnn": RnnHead}
    if config.head == "none":
        return None
    if config.head not in kinds:
        raise DrafterError(f"head {config.head!r} is unknown, expected none, {', '.join(kinds)}")
    return kinds[config.head](config, bf16, dtype)


def _init_linear(linear: Linear) -> None:
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)


def low_rank_logits(hidden: Tensor, lm_head: Tensor, rank: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The best rank-r approximation of the logits hidden @ lm_head^T, each row's mean left out (softmax does not see it).

    Best in the sum of squares over all n x V logits, rows weighted; the logits are never formed: with E the centred LM head and
    E^T E = R^T R, ||(A C - hidden) E^T|| = ||(A C - hidden) R^T||, so the right singular vectors of the weighted hidden R^T [n, H] do it.

    Args:
        hidden: [n, H] hidden states as they enter the LM head.
        lm_head: [V, H].
        rank: r, at most H.
        weights: [n] how much each row counts, positive.

    Returns:
        A [n, r] and B [r, V] of equal spread, A @ B ~ logits.

    Raises:
        DrafterError: rank above H, which this factorization cannot fill.
    """
    if rank > hidden.shape[1]:
        raise DrafterError(
            f"head_rank {rank} exceeds the hidden size {hidden.shape[1]}: a head cannot start from the target; start it at random"
        )
    centred = lm_head.double() - lm_head.double().mean(0)
    upper = torch.linalg.cholesky(centred.T @ centred, upper=True)
    seen = hidden.double() @ upper.T
    # Eigenvectors of the H x H moment, largest last: the right singular vectors without the tall SVD.
    basis = torch.linalg.eigh((seen * weights.double()[:, None]).T @ seen).eigenvectors[:, -rank:]
    A = seen @ basis
    B = torch.linalg.solve_triangular(upper, basis, upper=True).T @ centred.T
    balance = (B.std() / A.std()).sqrt()
    return (A * balance).to(hidden.dtype), (B / balance).to(hidden.dtype)
