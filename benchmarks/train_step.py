"""One training step of a DSpark drafter on the CPU: its time and memory against full logits, over anchors, and shared by two workers.

    python benchmarks/train_step.py                                    # all parts; some ten minutes on two idle cores
    python benchmarks/train_step.py --part full_logits                 # or anchors, workers: the other parts' figures stay as they are
    python benchmarks/train_step.py --profile                          # torch's own profile of one step

Weights and inputs are random; shapes are SmolLM2-135M's (H 576, two layers) at its vocabulary of 49,152 and at Qwen3's of 151,936.

full_logits: a sequence of 512 tokens, 64 anchors x 7, against the loss as one would write it first, in float32. anchors: the same over
16 to 512 anchors of a sequence of 768 tokens, and the loss alone, whose memory is that of a chunk of the vocabulary's logits however many
anchors there are. workers: four sequences on one worker at once, and on two workers in two micro-batches each: the gradient is the same.

Each measurement has a process of its own, in turns (A B A B). Peak memory is what a step needs above what stays between steps (weights,
optimizer state; gradients are freed), from the kernel's high-water mark.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.cluster import CPU_ENVIRONMENT
from actors.parallel import Parallel
from actors.totals import sum_over_ranks
from drafters import Drafter, DrafterConfig, LossWeights, SampleTensors, TargetFamily, TargetHead, TrainBatch, pack, sample_anchors
from drafters.losses import draft_loss
from pipelines.job import write_json

PARTS = ("full_logits", "anchors", "workers")
DECAY, LAYERS, BLOCK, RANK = 4.0, 2, 7, 256
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """What is measured. `compute` is the dtype of products, `naive` the full-logit step, always in float32."""

    vocab: int = 49_152
    hidden: int = 576
    tokens: int = 512
    sequences: int = 1
    anchors: int = 64
    compute: str = "bfloat16"
    naive: bool = False
    steps: int = 4
    threads: int = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="all by default")
    parser.add_argument("--vocabs", type=int, nargs="+", default=[49_152, 151_936], help="of full_logits; the other parts take the first")
    parser.add_argument("--anchors", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512], help="of the table over anchors")
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--threads", type=int, default=Shape.threads)
    parser.add_argument("--steps", type=int, default=Shape.steps, help="timed ones of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="turns of full_logits")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_step.json"))
    args = parser.parse_args()
    os.environ.update(CPU_ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))  # as the service's workers have it
    base = Shape(args.vocabs[0], args.hidden, threads=args.threads, steps=args.steps)
    if args.profile:
        alone(profile, base)
        return
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.part or PARTS:
        if part == "full_logits":
            found = [against_full_logits(replace(base, vocab=vocab), args.rounds) for vocab in args.vocabs]
        elif part == "anchors":
            found = [alone(measure, replace(base, tokens=768, anchors=anchors, steps=2)) for anchors in args.anchors]
        else:
            found = [workers(base)]
        result[part] = found
        write_json(args.out, result)
        print(part, *map(json.dumps, found), sep="\n", flush=True)


def alone(work: Callable[..., Any], *given: Any) -> Any:
    """In a fresh process: what another measurement left of the heap would count as resident."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


# Time and memory of a step


def against_full_logits(shape: Shape, rounds: int) -> dict[str, Any]:
    kinds = {"fused": shape, "fused_float32": replace(shape, compute="float32"), "naive": replace(shape, compute="float32", naive=True)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            found[name].append(alone(measure, kind))
    seconds = {name: statistics.median(row["step_s"] for row in rows) for name, rows in found.items()}
    peaks = {name: statistics.median(row["peak_mib"] for row in rows) for name, rows in found.items()}
    return {
        "vocab": shape.vocab,
        "step_s": seconds,
        "peak_mib": peaks,
        "speedup": {name: seconds["naive"] / seconds[name] for name in kinds if name != "naive"},
        "peak_ratio": {name: peaks[name] / peaks["naive"] for name in kinds if name != "naive"},
        "rounds": found,
    }


def measure(shape: Shape) -> dict[str, Any]:
    """Median seconds of a step and of its parts, after one to warm up, and its peak MiB; the loss's own peak where it is the fused one."""
    torch.set_num_threads(shape.threads)
    torch.manual_seed(0)
    drafter, batch = make_drafter(shape), make_batch(shape)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    loss_of = full_logit_loss if shape.naive else fused_loss
    marks: list[list[float]] = []

    def step() -> None:
        times = [time.perf_counter()]
        loss = loss_of(drafter, batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        marks.append(times)

    step()
    peak = peak_mib(step)
    for _ in range(shape.steps - 1):
        step()
    spent = [statistics.median(times[i + 1] - times[i] for times in marks[1:]) for i in range(3)]
    slots = int(batch.targets(BLOCK).valid.sum())
    found = {
        "anchors": shape.anchors,
        "slots": slots,
        "step_s": statistics.median(times[-1] - times[0] for times in marks[1:]),
        **dict(zip(("forward_s", "backward_s", "optimizer_s"), spent, strict=True)),
        "peak_mib": peak,
        "whole_logits_mib": slots * shape.vocab * 4 / MIB,
    }
    return found if shape.naive else {**found, "loss_peak_mib": peak_mib(lambda: loss_alone(drafter, batch))}


def fused_loss(drafter: Drafter, batch: TrainBatch) -> Tensor:
    return drafter(batch, LossWeights(), DECAY, drafter.denominator(batch, DECAY))[0]


def full_logit_loss(drafter: Drafter, batch: TrainBatch) -> Tensor:
    """The same loss as one would write it first: whole float32 logits, autograd through everything."""
    targets = batch.targets(BLOCK)
    h = drafter.block_states(batch)
    weight = drafter.target_head.lm_head
    assert drafter.head is not None
    assert drafter.confidence is not None
    previous = drafter.head.embed(targets.previous)
    logits = h @ weight.t() + drafter.head.latent_of(h, previous) @ drafter.head.W2
    teacher = (drafter.target_head.normed(batch.last_hidden[targets.teacher_rows]) @ weight.t()).softmax(-1)
    slots = torch.exp(-torch.arange(BLOCK) / DECAY) * targets.valid
    ce = F.cross_entropy(logits.flatten(0, 1), targets.labels.flatten(), reduction="none").view_as(slots)
    distance = (logits.softmax(-1) - teacher).abs().sum(-1)
    confidence = drafter.confidence(h, previous)
    bce = F.binary_cross_entropy_with_logits(confidence, (1 - distance.detach() / 2).clamp(0, 1), reduction="none")
    return (slots * (0.1 * ce + 0.9 * distance + bce)).sum() / slots.sum()


def loss_alone(drafter: Drafter, batch: TrainBatch) -> None:
    """Loss and gradients of all slots from given hidden states: what of a step's memory depends on the vocabulary."""
    assert drafter.head is not None
    targets = batch.targets(BLOCK)
    valid, W2 = targets.valid, drafter.head.W2
    h = torch.randn(int(valid.sum()), drafter.config.hidden_size, requires_grad=True)
    m = torch.randn(len(h), RANK, requires_grad=True)
    teacher, rows = drafter.target_head.normed(batch.last_hidden), targets.teacher_rows[valid]
    loss = draft_loss(h, m, W2, drafter.target_head, teacher, rows, targets.labels[valid], torch.ones(len(h)), LossWeights())
    torch.autograd.grad(loss.total, (h, m, W2))


def peak_mib(work: Callable[[], object]) -> float:
    """What `work` needs at most above what is resident before it."""
    # Else what the allocator keeps of earlier work would count as resident, and be used again unseen.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _status_mib("VmHWM") - before


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux")


def profile(shape: Shape) -> None:
    torch.set_num_threads(shape.threads)
    drafter, batch = make_drafter(shape), make_batch(shape)
    fused_loss(drafter, batch).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        fused_loss(drafter, batch).backward()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45), flush=True)


# Two workers against one


def workers(shape: Shape) -> dict[str, Any]:
    """Largest difference of the gradient, relative to its largest entry, between one worker and two that share the work; and step times."""
    shape = replace(shape, sequences=4, anchors=max(shape.anchors // 4, 1))
    found: dict[str, Any] = {"sequences": shape.sequences, "anchors": shape.anchors}
    with tempfile.TemporaryDirectory() as folder:
        for compute in ("float64", "float32", "bfloat16"):
            kind = replace(shape, compute=compute, threads=1, steps=2)
            gradients, seconds = [], []
            for world in (1, 2):
                place = Path(folder) / f"{compute}-{world}"
                place.mkdir()
                mp.spawn(share, (world, kind, str(place)), nprocs=world)
                gradients.append(load_file(place / "gradient.safetensors"))
                seconds.append(json.loads((place / "seconds.json").read_text()))
            one, two = gradients
            assert one.keys() == two.keys()
            worst = max(float((two[name] - value).abs().max() / value.abs().max()) for name, value in one.items())
            found[compute] = {"gradient_difference": worst, "step_s_one": seconds[0], "step_s_two": seconds[1]}
    return found


def share(rank: int, world: int, shape: Shape, place: str) -> None:
    """One worker's part of a step: its sequences, in micro-batches where there are several workers."""
    torch.set_num_threads(shape.threads)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers")  # of DDP, about a name that is to come
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=world)
    torch.manual_seed(0)
    drafter, device = make_drafter(shape), torch.device("cpu")
    parallel = Parallel(drafter, "ddp", world, device)
    mine = list(range(rank, shape.sequences, world))
    batches = [make_batch(shape, [index] if world > 1 else mine) for index in (mine if world > 1 else [0])]
    seconds = []
    for _ in range(shape.steps):
        drafter.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        total = sum_over_ranks(torch.stack([drafter.denominator(batch, DECAY) for batch in batches]).sum(), device)
        for number, batch in enumerate(batches):
            with parallel.accumulating(last=number == len(batches) - 1):
                (parallel.module(batch, LossWeights(), DECAY, total)[0] * world).backward()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        gradient = {name: parameter.grad for name, parameter in drafter.named_parameters() if parameter.grad is not None}
        save_file(gradient, Path(place) / "gradient.safetensors")
        (Path(place) / "seconds.json").write_text(json.dumps(min(seconds)))
    dist.destroy_process_group()


# Random weights and inputs


def make_drafter(shape: Shape) -> Drafter:
    vocab, hidden = shape.vocab, shape.hidden
    rows = torch.randn(vocab, hidden) * 0.1
    head = TargetHead(vocab, hidden, 1e-5, TargetFamily(), getattr(torch, shape.compute)).load(rows, torch.ones(hidden), rows)
    config = DrafterConfig(
        algorithm="dspark",
        layout="dspark",
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_layers=LAYERS,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 64 // 3 or 1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        vocab_size=vocab,
        captured_layers=5,
        block_length=BLOCK,
        mask_token_id=0,
        head="markov",
        head_rank=RANK,
        confidence=True,
        confidence_markov=True,
        qk_norm=False,
        activation="silu",
    )
    return Drafter(config, head)


def make_batch(shape: Shape, sequences: list[int] | None = None) -> TrainBatch:
    """The named sequences packed, all by default; each is the same in whatever batch it is."""
    samples, anchors = [], []
    for index in range(shape.sequences) if sequences is None else sequences:
        draw = torch.Generator().manual_seed(index)
        mask = torch.arange(shape.tokens) >= shape.tokens // 5
        rows = mask[1:].nonzero().squeeze(1)
        ids = torch.randint(0, shape.vocab, (shape.tokens,), generator=draw)
        context = torch.randn(5, shape.tokens, shape.hidden, generator=draw).bfloat16()
        last_hidden = torch.randn(len(rows), shape.hidden, generator=draw).bfloat16()
        samples.append(SampleTensors(ids, mask, context, last_hidden, rows))
        anchors.append(sample_anchors(mask, shape.anchors, draw))
    return pack(samples, anchors)


if __name__ == "__main__":
    main()
