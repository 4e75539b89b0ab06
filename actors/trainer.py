"""The training service: Ray Train workers that stream cached samples and train one drafter.

Every number that must survive a restart lies in a checkpoint on storage; where a run stands is one global step, from which the
reading order follows for any number of workers.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors import checkpointing
from actors.batches import MicroBatch, Packing, tokens_of
from actors.checkpointing import Standing
from actors.drafter import build_drafter
from actors.errors import ActorError, Stopped
from actors.heldout_decoding import HeldoutDecoding, prompt_of
from actors.optimization import Optimizer
from actors.parallel import Parallel, collect
from actors.starting import start_drafter
from actors.totals import Totals, gathered, sum_over_ranks
from actors.train_recipe import TrainRecipe, TrainSettings
from storage.disk_cache import DiskCache, DiskCacheSettings
from storage.follow import FollowOrder
from storage.manifest import Manifest, split_manifest
from storage.order import ReadingOrder, rank_slots, step_seed
from storage.reader import Entries, SampleReader

# Held-out rows draw the same anchors at every scoring.
_HELDOUT_EPOCH = 2**31
_ASK_EVERY_SECONDS = 1.0
_ROWS_NAMED = 8


class Board(Protocol):
    """Where rank 0 leaves metric rows, and learns whether to stop. Metadata only."""

    def post(self, row: dict[str, Any]) -> None:
        """Take a row; any thread may call it."""
        ...

    def keep(self) -> None:
        """See that what was posted outlives this process: a checkpoint comes next, and the steps before it are not taken again."""
        ...

    def stopping(self) -> bool:
        """Whether somebody wants the run to end after the step that it is in."""
        ...


class Worker:
    """One rank, where its run stands. Plain enough to run without Ray (board None, world 1)."""

    def __init__(self, recipe: TrainRecipe, board: Board | None, rank: int, world: int) -> None:
        self.recipe, self.settings, self.board, self.rank, self.world = recipe, recipe.settings, board, rank, world
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        _prepare_process(self.settings)
        saved = checkpointing.load(recipe.run)
        self.standing = Standing() if saved is None else saved.standing
        self.drafter = build_drafter(recipe.model, recipe.drafter, self.settings.compute).to(self.device)
        compiled = self.settings.compile == "true" or (self.settings.compile == "auto" and self.device.type == "cuda")
        self.drafter.prepare_layers(self.settings.activation_checkpointing, compiled)
        if saved is not None:
            self.drafter.load_trainable(saved.weights)
        elif rank == 0:  # one works the start out, all get it
            start_drafter(self.drafter, recipe, self.device)
        self.parallel = Parallel(self.drafter, self.settings.parallel, world, self.device)
        self.optimizer = Optimizer(dict(self.drafter.named_parameters()), self.settings)
        if saved is not None:
            self.optimizer.load(saved.tensors)
        planes = tuple(recipe.contract.capture.layer_ids.index(layer) for layer in recipe.layer_ids)
        self.packing = Packing(self.settings.anchors, self.settings.seed, self.device, planes)
        self.stand_in = self.packing.stand_in(recipe.drafter.hidden_size)
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
        decode = self.settings.decode
        self.decoding = None if decode is None else HeldoutDecoding(recipe, decode, self.drafter.target_head, self.device)
        self._asked, self._stopping = 0.0, False
        self._readers: list[SampleReader] = []
        self._bytes_told = np.zeros(2)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.standing.step

    def run(self) -> None:
        """Train from the newest checkpoint to the last step, to the end of the patience, or until the board says to stop."""
        try:
            with self._reader(self.training) as reader:
                self._train(reader)
        except Stopped:
            if self.step:
                self._save(together=False)
            if self.world > 1:  # the other ranks wait for samples, or for this rank
                raise

    def _train(self, reader: SampleReader) -> None:
        settings = self.settings
        samples = reader.stream(self._positions(self.step))
        totals, interval = Totals(), _Interval()
        stop = False
        while not (stop or self.standing.finished(settings)):
            torch.manual_seed(step_seed(settings.seed, self.step))
            started, waited = time.perf_counter(), reader.wait_seconds
            share = [next(samples) for _ in rank_slots(np.arange(settings.global_batch), self.rank, self.world)]
            batch = self.order.global_batch(self.step, settings.global_batch)
            assert batch is not None  # its samples are here
            norm, stop = self._optimize(self.packing.split(share, settings.micro_batch, batch[0]), totals)
            self.standing = replace(self.standing, step=self.step + 1)
            interval.add(time.perf_counter() - started, reader.wait_seconds - waited, tokens_of(share))
            last = self.step == settings.steps
            if self.step % settings.log_every == 0 or last:
                self._post(self._row(totals, interval, batch[0], norm))
                totals, interval = Totals(), _Interval()
            if self.step % settings.score_every == 0 or last:
                self._score()
            improved = self.standing.best_tau is not None and self.standing.best_step == self.step
            if improved or stop or self.step % settings.checkpoint_every == 0 or self.standing.finished(settings):
                self._save()

    # One step

    def _positions(self, start: int) -> Iterator[int | None]:
        """This rank's samples from step `start` to the end, in reading order; None while a growing cache does not hold the next ones."""
        for step in range(start, self.settings.steps):
            while (batch := self.order.global_batch(step, self.settings.global_batch)) is None:
                # Slices of the weights are gathered by all ranks together, and these may wait in different places.
                if not self.parallel.sharded and self._stop_asked():
                    raise Stopped("stopped while waiting for the cache")
                yield None
            yield from rank_slots(batch[1], self.rank, self.world).tolist()

    def _optimize(self, batches: Sequence[MicroBatch], totals: Totals) -> tuple[float, bool]:
        """Take one step; the gradient's norm, and whether the board wants it to be the last one."""
        settings = self.settings
        # The weight total of the whole global batch, before any loss is formed: means of means would weigh short samples more.
        total = torch.stack([self.drafter.denominator(micro.batch, settings.decay) for micro in batches]).sum()
        agreed = sum_over_ranks(torch.stack([total, total.new_tensor(float(self._stop_asked()))]), self.device)
        losses = self._accumulate(batches, agreed[0], totals)
        norm = self.optimizer.clip()
        if not (math.isfinite(norm) and all(map(math.isfinite, losses))):
            raise self._not_finite(batches, losses, norm)
        self.optimizer.step(self.step)
        return norm, bool(agreed[1])

    def _accumulate(self, batches: Sequence[MicroBatch], denominator: Tensor, totals: Totals) -> list[float]:
        """Gradients of the global batch in the weights, of this rank's and of all others' samples; the losses of this rank's."""
        settings, losses = self.settings, []
        self.optimizer.adam.zero_grad(set_to_none=True)
        for number, micro in enumerate(batches):
            # All ranks must gather each layer's slices equally often, also where no anchor fell on a sample.
            idle = self.parallel.sharded and micro.batch.num_anchors == 0
            with self.parallel.accumulating(last=number == len(batches) - 1):
                batch, divisor = (self.stand_in.batch, 1.0) if idle else (micro.batch, denominator)
                loss, metrics = self.parallel.module(batch, settings.weights, settings.decay, divisor)
                # Gradients are averaged over ranks; the denominator is already the whole batch's, so the sum is wanted.
                (loss * (0 if idle else self.world)).backward()
            if not idle:
                totals.add(metrics)
                losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def _not_finite(self, batches: Sequence[MicroBatch], losses: Sequence[float], norm: float) -> ActorError:
        """What to tell of a step whose loss or gradient is not finite, with the rows that made it so."""
        suspects = [row for micro, loss in zip(batches, losses, strict=False) if not math.isfinite(loss) for row in micro.rows]
        everything = [row for micro in batches for row in micro.rows]
        if not math.isfinite(norm):  # on every rank then, since gradients are shared
            suspects, everything = gathered(suspects), gathered(everything)
        named = ", ".join((suspects or everything)[:_ROWS_NAMED]) + (" ..." if len(suspects or everything) > _ROWS_NAMED else "")
        what = "loss" if suspects else f"gradient (norm {norm})"
        advice = "lower train.learning_rate, or verify the cache (`python -m pipelines.cache --verify`)"
        if suspects and len(suspects) < len(everything):
            advice = "look at these rows: verify the cache (`python -m pipelines.cache --verify`), or lower train.learning_rate"
        return ActorError(f"the {what} at step {self.step} is not finite. Rows: {named}. The last checkpoint is intact; {advice}.")

    # What is told and kept

    def _row(self, totals: Totals, interval: "_Interval", epoch: int, norm: float) -> dict[str, float]:
        """What there is to watch of the steps since the last row, over all ranks."""
        shared = sum_over_ranks(torch.tensor([interval.tokens, interval.waited], dtype=torch.float64), self.device).tolist()
        seconds, batch = interval.seconds, self.settings.global_batch
        return {
            "epoch": epoch,
            "samples": self.step * batch,
            "learning_rate": self.optimizer.learning_rate,
            "gradient_norm": norm,
            "samples_per_second": interval.steps * batch / seconds,
            "tokens_per_second": shared[0] / seconds,
            "data_wait_share": shared[1] / (seconds * self.world),
            "step_seconds": seconds / interval.steps,
            **self._bytes_read(),
            **totals.means(self.device),
        }

    def _bytes_read(self) -> dict[str, float]:
        """Encoded bytes that came from the store, and from the node's disk instead, since this was asked last, over all ranks."""
        cache = self.disk_cache
        read = sum(reader.read_bytes for reader in self._readers) if cache is None else cache.fetched_bytes
        now = np.array([read, 0 if cache is None else cache.hit_bytes], dtype=np.float64)
        new, self._bytes_told = now - self._bytes_told, now
        shared = sum_over_ranks(torch.from_numpy(new), self.device).tolist()
        return {"store_bytes": shared[0], "disk_bytes": shared[1]}

    def _post(self, row: dict[str, float]) -> None:
        if self.rank == 0 and self.board is not None:
            self.board.post({"step": self.step, **row})

    def _tell(self, text: str) -> None:
        """A line for the person who watches."""
        if self.board is not None:
            self.board.post({"step": self.step, "notice": f"rank {self.rank}: {text}"})

    def _stop_asked(self) -> bool:
        """Whether the board wants the run to stop. Rank 0 asks, every second at most; the others learn of it in the step."""
        now = time.monotonic()
        if self.rank == 0 and self.board is not None and now - self._asked >= _ASK_EVERY_SECONDS:
            self._asked, self._stopping = now, self.board.stopping()
        return self._stopping

    def _score(self) -> None:
        """Metrics on the held-out rows, each rank taking its share, with the averaged weights if there are any."""
        settings, totals = self.settings, Totals()
        mine = rank_slots(np.arange(len(self.heldout)), self.rank, self.world).tolist()
        rounds = -(-len(self.heldout) // self.world) if self.parallel.sharded else len(mine)
        prompts: dict[int, Tensor] = {}
        with self._reader(self.heldout) as reader, self.optimizer.averaged():
            samples = reader.stream(mine)
            with self.parallel.scoring():
                for number in range(rounds):
                    sample = next(samples) if number < len(mine) else None
                    micro = self.stand_in if sample is None else self.packing.pack([sample], _HELDOUT_EPOCH)
                    idle = self.parallel.sharded and micro.batch.num_anchors == 0
                    batch = self.stand_in.batch if idle else micro.batch
                    metrics = self.drafter(batch, settings.weights, settings.decay, 1.0)[1]
                    if micro.rows and not idle:
                        totals.add(metrics)
                    if sample is not None and settings.decode is not None and mine[number] < settings.decode.prompts:
                        prompts[mine[number]] = prompt_of(sample)
            if self.decoding is not None:
                totals.add(self.decoding.metrics(collect(self.optimizer.parameters, keep=True), prompts))
        means = totals.means(self.device)
        self.standing = self.standing.scored(means.get(settings.score))
        self._post({**self._bytes_read(), **{f"heldout/{name}": value for name, value in means.items()}})

    def _reader(self, entries: Entries) -> SampleReader:
        settings = self.settings
        reader = SampleReader(
            self.recipe.cache,
            self.recipe.contract,
            entries,
            settings.reader_threads,
            settings.prefetch_mib << 20,
            stall_seconds=60 * settings.stall_minutes,
            disk_cache=self.disk_cache,
        )
        self._readers.append(reader)
        return reader

    def _save(self, together: bool = True) -> None:
        """Write a checkpoint; `together`: no rank goes on before it is whole."""
        weights, optimizer = (collect(state, self.rank == 0) for state in (self.optimizer.parameters, self.optimizer.state()))
        if self.rank == 0:
            if self.board is not None:
                self.board.keep()
            checkpointing.save(
                self.recipe.run, weights, optimizer, self.standing, self.recipe.manifest_hash, self.settings.keep_checkpoints
            )
        if together and self.world > 1:
            dist.barrier()


@dataclass
class _Interval:
    """The steps since the last row: scoring and checkpoints do not count."""

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, waited: float, tokens: int) -> None:
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.waited, self.tokens = self.waited + waited, self.tokens + tokens


def _prepare_process(settings: TrainSettings) -> None:
    # Softmax over a vocabulary is full of numbers next to zero; denormal ones cost a CPU a hundred times as much.
    torch.set_flush_denormal(True)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(settings.seed)
