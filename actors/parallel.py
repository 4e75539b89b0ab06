"""How the ranks share one drafter: whole on each of them (DDP), or every tensor in slices (FSDP2)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from drafters.backbone import DraftLayer
from drafters.drafter import Drafter


class Parallel:
    """One rank's way to call a drafter that `world` ranks share; rank 0's weights become everybody's.

    Both ways *average* gradients over the ranks. `kind` is `ddp` or `fsdp`; with one rank neither is needed.
    """

    def __init__(self, drafter: Drafter, kind: str, world: int, device: torch.device) -> None:
        self.drafter, self.sharded = drafter, kind == "fsdp" and world > 1
        self.module: nn.Module = drafter
        if self.sharded:
            for parameter in drafter.parameters():
                dist.broadcast(parameter.data, 0)
            shard(drafter, world, device)
        elif world > 1:
            self.module = DistributedDataParallel(drafter, broadcast_buffers=False)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch's forward and backward: gradients are exchanged with the `last` one of a step only."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            return nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Around forwards without gradient, whose gathered weights must not be taken for the next step's."""
        try:
            with torch.no_grad():
                yield
        finally:
            self.release()

    def release(self) -> None:
        """Drop gathered weights: what `named_parameters` gives is then this rank's slices again."""
        for module in self.drafter.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard(drafter: Drafter, world: int, device: torch.device) -> None:
    """FSDP2 in place, a unit for each layer of a parallel drafter and one for all the rest (a chain has one layer)."""
    mesh = init_device_mesh(device.type, (world,))
    for layer in drafter.backbone.layers:
        if isinstance(layer, DraftLayer):
            fully_shard(layer, mesh=mesh)
            register_fsdp_forward_method(layer, "context_keys_values")
    fully_shard(drafter, mesh=mesh)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A tensor out of its slices; every rank must call it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def collect(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors in main memory, one after the other, on the rank that keeps them; every rank must call it."""
    found = {}
    for name, tensor in tensors.items():
        value = whole(tensor)
        if keep:
            found[name] = value.cpu()
    return found


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, as `like` is: moved to its device, cut in slices where it is."""
    moved = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return moved
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
