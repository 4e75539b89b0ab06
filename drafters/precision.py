"""Matrix products in a chosen precision: bf16 operands with float32 sums and results, or plain float32 / float64.

On the CPU a float32 product is handed to oneDNN with permission to round its *operands* to bf16 (AMX and AVX512-BF16 run it several
times faster than float32); sums and results stay float32, so nothing around the product needs a cast or loses precision. On CUDA the
operands are cast explicitly. Weights stay float32 (the optimizer's master copy) in both cases.

Decoding multiplies every weight with a few rows, so reading the weights is what it costs: there they are held in bf16
(`Drafter.for_decoding`), and results are rounded to bf16, as the target's own are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Rows of a bf16 weight that are widened to float32 at a time: 8192 x H stays in the last-level cache, and larger tiles gain nothing.
_TILE_ROWS = 8192


@contextmanager
def bf16_operands() -> Iterator[None]:
    """Let float32 CPU products round their operands to bf16 inside this block (process-wide while it lasts)."""
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


class _Bf16Linear(torch.autograd.Function):
    """x W^T + b with bf16 operands in forward and backward (a context manager around the forward alone would miss the latter)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        with bf16_operands():
            return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        with bf16_operands():
            grad_x = (grad @ weight).view_as(x) if ctx.needs_input_grad[0] else None
            grad_weight = grad.t() @ x.reshape(-1, weight.shape[1]) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


class Linear(nn.Linear):
    """nn.Linear with weights of the master dtype and, where `bf16` is set, products with bf16 operands.

    Input and output have the master dtype.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False, bf16: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=dtype)
        self.bf16 = bf16

    def forward(self, x: Tensor) -> Tensor:
        if not self.bf16:
            return F.linear(x, self.weight, self.bias)
        if self.weight.dtype == torch.bfloat16:
            return bf16_linear(x, self.weight, self.bias)
        if x.device.type == "cpu":
            return _Bf16Linear.apply(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(x.bfloat16(), self.weight.bfloat16(), bias).to(x.dtype)


def bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., n] @ weight^T [m, n] + bias in bf16, the result in x's dtype: for weights that are held in bf16.

    As one flat product: with a batch of one that is a slice of a larger block, torch else takes a path that is 20 times slower.
    """
    flat = F.linear(x.bfloat16().reshape(-1, x.shape[-1]), weight, bias)
    return flat.to(x.dtype).view(*x.shape[:-1], -1)


def project(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ weight^T in x's dtype, for a frozen weight in x's dtype or in bf16 (then with bf16 operands and float32 results).

    Args:
        x: [N, H] float32 or float64.
        weight: [V, H] in x's dtype or bf16.
        out: optional [N, V] in x's dtype to write to.

    Returns:
        [N, V] in x's dtype. No gradient.
    """
    with torch.no_grad():
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[0])
        if weight.dtype == x.dtype:
            return torch.mm(x, weight.t(), out=out)
        if x.device.type != "cpu":
            return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=x.dtype, out=out)
        tile = x.new_empty(min(_TILE_ROWS, weight.shape[0]), weight.shape[1])
        with bf16_operands():
            for start in range(0, weight.shape[0], _TILE_ROWS):
                part = weight[start : start + _TILE_ROWS]
                wide = tile[: part.shape[0]].copy_(part)
                torch.mm(x, wide.t(), out=out[:, start : start + part.shape[0]])
        return out
