"""The training service: Ray Train workers that stream cached samples and train one drafter.

Every number that must survive a restart lies in a checkpoint on storage; where a run stands is one global step, from which the
reading order follows for any number of workers.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from actors.drafter import build_drafter
from actors.errors import ActorError
from actors.head_start import start_head
from actors.train_recipe import CHECKPOINTS, TrainRecipe
from drafters.anchors import sample_anchors
from drafters.batch import SampleTensors, TrainBatch, pack
from drafters.drafter import Metrics
from storage.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from storage.disk_cache import DiskCache, DiskCacheSettings
from storage.follow import FollowOrder
from storage.manifest import Manifest, split_manifest
from storage.order import ReadingOrder, anchor_seed, rank_slots
from storage.reader import Entries, SampleReader
from storage.sample import Sample

# Held-out rows draw the same anchors at every scoring.
_HELDOUT_EPOCH = 2**31


class Worker:
    """One rank. Plain enough to run without Ray (board None, world 1)."""

    def __init__(self, recipe: TrainRecipe, board: Any, rank: int, world: int) -> None:
        self.recipe, self.settings, self.board, self.rank, self.world = recipe, recipe.settings, board, rank, world
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        # Softmax over a vocabulary is full of numbers next to zero; denormal ones cost a CPU a hundred times as much.
        torch.set_flush_denormal(True)
        torch.manual_seed(self.settings.seed)
        self.drafter = build_drafter(recipe.model, recipe.drafter, self.settings.compute).to(self.device)
        # One rank works out the start; building DDP hands its weights to all.
        if self.settings.head_start == "target" and rank == 0 and not has_checkpoint(recipe.run, CHECKPOINTS):
            start_head(self.drafter, recipe.model, self.device)
        self.module: torch.nn.Module = self.drafter
        if world > 1:
            self.module = torch.nn.parallel.DistributedDataParallel(self.drafter, broadcast_buffers=False)
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(),
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        self.step = 0
        self.order: ReadingOrder | FollowOrder
        self.training: Entries
        if recipe.follow is None:
            manifest = Manifest.load(recipe.cache, recipe.manifest_hash)
            self.training, self.heldout = split_manifest(manifest, self.settings.heldout_rows)
            self.order = ReadingOrder(self.training, self.settings.seed)
        else:
            self.order = self.training = FollowOrder(
                recipe.cache, recipe.run, recipe.follow, self.settings.seed, self.settings.heldout_rows, rank == 0, self._tell
            )
            self.heldout = self.order.wait_for_heldout()
        self.disk_cache: DiskCache | None = None
        if self.settings.disk_cache_gib:
            settings = DiskCacheSettings(self.settings.disk_cache, int(self.settings.disk_cache_gib * 2**30))
            self.disk_cache = DiskCache(settings, self._tell)

    def run(self) -> None:
        """Train from the newest checkpoint to the last step."""
        settings = self.settings
        self._resume()
        with self._reader(self.training) as reader:
            samples = reader.stream(self._positions(self.step))
            totals, since, waited, tokens = _Totals(), time.perf_counter(), 0.0, 0
            while self.step < settings.steps:
                batches, epoch, count = self._next_batches(samples)
                gradient_norm = self._optimize(batches, totals)
                tokens += count
                self.step += 1
                last = self.step == settings.steps
                if self.step % settings.log_every == 0 or last:
                    seconds = time.perf_counter() - since
                    self._post(
                        totals,
                        epoch=epoch,
                        samples=self.step * settings.global_batch,
                        learning_rate=self.optimizer.param_groups[0]["lr"],
                        gradient_norm=gradient_norm,
                        tokens_per_second=tokens * self.world / seconds,
                        data_wait_share=(reader.wait_seconds - waited) / seconds,
                        step_seconds=seconds
                        / (settings.log_every if self.step % settings.log_every == 0 else self.step % settings.log_every),
                    )
                    totals, since, waited, tokens = _Totals(), time.perf_counter(), reader.wait_seconds, 0
                if self.step % settings.score_every == 0 or last:
                    self._score()
                    since = time.perf_counter()
                if self.step % settings.checkpoint_every == 0 or last:
                    self._save()
                    since = time.perf_counter()

    # One step

    def _positions(self, start: int) -> Iterator[int | None]:
        """This rank's samples from step `start` to the end, in reading order; None while a growing cache does not hold the next ones."""
        for step in range(start, self.settings.steps):
            while (batch := self.order.global_batch(step, self.settings.global_batch)) is None:
                yield None
            yield from rank_slots(batch[1], self.rank, self.world).tolist()

    def _next_batches(self, samples: Iterator[Sample]) -> tuple[list[TrainBatch], int, int]:
        share = [next(samples) for _ in rank_slots(np.arange(self.settings.global_batch), self.rank, self.world)]
        batch = self.order.global_batch(self.step, self.settings.global_batch)
        assert batch is not None  # its samples are here
        epoch = batch[0]
        groups = [share[start : start + self.settings.micro_batch] for start in range(0, len(share), self.settings.micro_batch)]
        return [self._pack(group, epoch) for group in groups], epoch, sum(len(sample.input_ids) for sample in share)

    def _pack(self, samples: Sequence[Sample], epoch: int) -> TrainBatch:
        tensors = [to_tensors(sample) for sample in samples]
        anchors = [
            sample_anchors(
                tensor.loss_mask,
                self.settings.anchors,
                torch.Generator().manual_seed(anchor_seed(self.settings.seed, epoch, sample.row_id)),
            )
            for tensor, sample in zip(tensors, samples, strict=True)
        ]
        return pack(tensors, anchors).to(self.device)

    def _optimize(self, batches: Sequence[TrainBatch], totals: "_Totals") -> float:
        settings = self.settings
        # The weight total of the whole global batch, before any loss is formed: means of means would weigh short samples more.
        denominator = torch.stack([self.drafter.denominator(batch, settings.decay) for batch in batches]).sum()
        self._sum_over_ranks(denominator)
        self.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(batches):
            with self._synchronized(number == len(batches) - 1):
                loss, metrics = self.module(batch, settings.weights, settings.decay, denominator)
                # DDP averages over ranks; the denominator is already the whole batch's, so the sum is wanted.
                (loss * self.world).backward()
            totals.add(metrics)
        norm = float(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), settings.clip))
        if not math.isfinite(norm):
            raise ActorError(
                f"the gradient at step {self.step} is not finite (norm {norm}). The last checkpoint is intact; lower train.learning_rate, "
                "or verify the cache."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * schedule(self.step, settings.steps, settings.warmup)
        self.optimizer.step()
        return norm

    def _synchronized(self, last: bool) -> Any:
        from contextlib import nullcontext

        if last or not isinstance(self.module, torch.nn.parallel.DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def _sum_over_ranks(self, value: Tensor) -> None:
        if self.world > 1:
            shared = value.to(self.device)  # NCCL knows no tensors in main memory
            dist.all_reduce(shared)
            value.copy_(shared)

    # What is told and kept

    def _post(self, totals: "_Totals", prefix: str = "", **also: float) -> None:
        values = totals.means(self._sum_over_ranks)
        if self.rank == 0 and self.board is not None:
            named = {f"{prefix}{name}": value for name, value in values.items()}
            ray.get(self.board.post.remote({"step": self.step, **also, **named}))

    @torch.no_grad()
    def _score(self) -> None:
        """tau_teacher_forced and the rest on the held-out rows, each rank taking its share."""
        totals = _Totals()
        mine = rank_slots(np.arange(len(self.heldout)), self.rank, self.world).tolist()
        with self._reader(self.heldout) as reader:
            for sample in reader.stream(mine):
                batch = self._pack([sample], _HELDOUT_EPOCH)
                totals.add(self.drafter.training_step(batch, self.settings.weights, self.settings.decay, 1.0)[1])
        self._post(totals, "heldout/")

    def _tell(self, text: str) -> None:
        """A line for the person who watches."""
        if self.board is not None:
            self.board.post.remote({"step": self.step, "notice": f"rank {self.rank}: {text}"})

    def _reader(self, entries: Entries) -> SampleReader:
        settings = self.settings
        threads, prefetch = settings.reader_threads, settings.prefetch_mib << 20
        return SampleReader(self.recipe.cache, self.recipe.contract, entries, threads, prefetch, disk_cache=self.disk_cache)

    def _save(self) -> None:
        if self.rank == 0:
            names = [name for name, _ in self.drafter.named_parameters()]
            state = self.optimizer.state_dict()["state"]
            tensors = {f"drafter/{name}": tensor for name, tensor in self.drafter.trainable_state().items()}
            for index, values in state.items():
                tensors |= {f"optimizer/{names[index]}/{key}": value for key, value in values.items()}
            save_checkpoint(self.recipe.run, CHECKPOINTS, tensors, {"state": {"step": self.step, "manifest": self.recipe.manifest_hash}})
        if self.world > 1:
            dist.barrier()

    def _resume(self) -> None:
        if not has_checkpoint(self.recipe.run, CHECKPOINTS):
            return
        tensors, files = load_checkpoint(self.recipe.run, CHECKPOINTS)
        self.drafter.load_trainable({name.removeprefix("drafter/"): t for name, t in tensors.items() if name.startswith("drafter/")})
        state: dict[int, dict[str, Tensor]] = {}
        for index, (name, _) in enumerate(self.drafter.named_parameters()):
            prefix = f"optimizer/{name}/"
            state[index] = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.step = int(files["state"]["step"])


class _Totals:
    """Numerators and denominators added up until they are shown."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: Metrics) -> None:
        for name, (numerator, denominator) in metrics.items():
            pair = torch.stack([numerator.detach(), denominator.detach()]).double().cpu()
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def means(self, sum_over_ranks: Callable[[Tensor], None]) -> dict[str, float]:
        """Each metric over all ranks. Every rank must call it: metrics without a trial on one rank still take part."""
        names = _on_any_rank(self.sums)
        if not names:
            return {}
        table = torch.stack([self.sums.get(name, torch.zeros(2, dtype=torch.float64)) for name in names])
        sum_over_ranks(table)
        return {name: (row[0] / row[1]).item() for name, row in zip(names, table, strict=True) if row[1] > 0}


def _on_any_rank(names: Iterable[str]) -> list[str]:
    """Sorted union over the ranks: one whose share held no anchor has no metrics, and still takes part in the sum."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sorted(names)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(names))
    return sorted({name for part in gathered for name in part})


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor of the learning rate: linear over the first `warmup` share of the steps, then half a cosine to zero."""
    rising = max(int(steps * warmup), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


def to_tensors(sample: Sample) -> SampleTensors:
    """A cached sample as tensors; bf16 bits are viewed, not converted."""
    return SampleTensors(
        input_ids=torch.from_numpy(sample.input_ids.astype(np.int64)),
        loss_mask=torch.from_numpy(sample.loss_mask()),
        context=torch.from_numpy(sample.context).view(torch.bfloat16),
        last_hidden=torch.from_numpy(sample.last_hidden).view(torch.bfloat16),
        last_rows=torch.from_numpy(sample.last_rows.astype(np.int64)),
    )
