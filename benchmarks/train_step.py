"""One training step of a DSpark drafter on the CPU: time of its parts, and against a straightforward full-logit implementation.

    python benchmarks/train_step.py --threads 2 --sequences 2 --anchors 24
    python benchmarks/train_step.py --naive --anchors 64 --tokens 512        # also the full-logit step
    python benchmarks/train_step.py --profile                                # torch's own profile of one step

Weights and inputs are random; the shape is SmolLM2-135M's by default. Peak memory is what a step needs above what is resident between steps
(weights, optimizer state; gradients are freed), from the kernel's high-water mark. On a busy machine trust cpu_s, with one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters import Drafter, DrafterConfig, LossWeights, SampleTensors, TargetFamily, TargetHead, TrainBatch, pack, sample_anchors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=200, help="per sequence")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--anchors", type=int, default=24, help="per sequence")
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--head", default="markov", choices=["none", "markov", "gated", "rnn"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--attention", default="split", choices=["split", "sdpa"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--naive", action="store_true", help="also time the full-logit step in float32")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    drafter, batch = make_drafter(args), make_batch(args)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def fused_loss() -> Tensor:
        return drafter(batch, LossWeights(), 4.0, drafter.denominator(batch, 4.0))[0]

    def naive_loss() -> Tensor:
        return full_logit_loss(drafter, batch)

    result = {"shape": vars(args), "fused": measure(drafter, optimizer, fused_loss, args.steps)}
    if args.naive:
        result["naive"] = measure(drafter, optimizer, naive_loss, max(2, args.steps // 4))
        result["speedup"] = result["naive"]["median_s"]["step"] / result["fused"]["median_s"]["step"]
        result["peak_ratio"] = result["fused"]["peak_mib"] / result["naive"]["peak_mib"]
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fused_loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))
    print(json.dumps(result, indent=2))


def make_drafter(args: argparse.Namespace) -> Drafter:
    V, H = args.vocab, args.hidden
    rows = torch.randn(V, H) * 0.1
    head = TargetHead(V, H, 1e-5, TargetFamily(), getattr(torch, args.dtype)).load(rows, torch.ones(H), rows)
    markov = args.head != "none"
    config = DrafterConfig(
        algorithm="dspark",
        layout="dspark",
        hidden_size=H,
        intermediate_size=H * 8 // 3,
        num_layers=2,
        num_heads=H // 64,
        num_kv_heads=H // 64 // 3 or 1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        vocab_size=V,
        captured_layers=5,
        block_length=args.block,
        mask_token_id=0,
        head=args.head,
        head_rank=256 if markov else 0,
        confidence=True,
        confidence_markov=markov,
        qk_norm=False,
        activation="silu",
    )
    return Drafter(config, head, attention=args.attention)


def make_batch(args: argparse.Namespace) -> TrainBatch:
    samples, anchors = [], []
    for index in range(args.sequences):
        mask = torch.arange(args.tokens) >= args.tokens // 5
        rows = mask[1:].nonzero().squeeze(1)
        ids = torch.randint(0, args.vocab, (args.tokens,))
        context = torch.randn(5, args.tokens, args.hidden, dtype=torch.bfloat16)
        samples.append(SampleTensors(ids, mask, context, torch.randn(len(rows), args.hidden).bfloat16(), rows))
        anchors.append(sample_anchors(mask, args.anchors, torch.Generator().manual_seed(index)))
    return pack(samples, anchors)


def full_logit_loss(drafter: Drafter, batch: TrainBatch) -> Tensor:
    """The same loss as one would write it first: whole float32 logits, autograd through everything."""
    targets = batch.targets(drafter.config.block_length)
    h = drafter.block_states(batch)
    weight = drafter.target_head.lm_head.float()
    logits = h @ weight.t()
    previous = None
    if drafter.head is not None:
        previous = drafter.head.embed(targets.previous)
        logits = logits + drafter.head.latent_of(h, previous) @ drafter.head.W2
    teacher = (drafter.target_head.normed(batch.last_hidden[targets.teacher_rows]) @ weight.t()).softmax(-1)
    slots = torch.exp(-torch.arange(drafter.config.block_length) / 4.0) * targets.valid
    ce = F.cross_entropy(logits.flatten(0, 1), targets.labels.flatten(), reduction="none").view_as(slots)
    distance = (logits.softmax(-1) - teacher).abs().sum(-1)
    loss = 0.1 * ce + 0.9 * distance
    if drafter.confidence is not None:
        confidence = drafter.confidence(h, previous)
        loss = loss + F.binary_cross_entropy_with_logits(confidence, (1 - distance.detach() / 2).clamp(0, 1), reduction="none")
    return (slots * loss).sum() / slots.sum()


def measure(drafter: Drafter, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], steps: int) -> dict[str, Any]:
    """Seconds of forward, backward, clipping and optimizer over `steps`, after two to warm up; peak MiB above the resident state."""
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "clip": [], "optimizer": [], "step": []}
    cpu: list[float] = []
    resident = peak = 0.0
    for index in range(steps + 2):
        if index == 1:
            resident = _status_mib("VmRSS")
            _reset_peak()
        started = time.process_time()
        marks = [time.perf_counter()]
        loss = loss_of()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        if index == 1:
            peak = _status_mib("VmHWM") - resident
        if index >= 2:
            for name, start, stop in zip(parts, marks, marks[1:], strict=False):
                parts[name].append(stop - start)
            parts["step"].append(marks[-1] - marks[0])
            cpu.append(time.process_time() - started)
    fastest = {name: min(values) for name, values in parts.items()}
    median = {name: statistics.median(values) for name, values in parts.items()}
    return {"median_s": median, "fastest_s": fastest, "cpu_s": min(cpu), "peak_mib": peak}


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}; this benchmark needs Linux")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
