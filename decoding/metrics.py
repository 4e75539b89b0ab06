"""Acceptance metrics of decoded requests, as numerators and denominators (DESIGN 6).

What counts: a round's draft tokens up to an accepted stop token, or all of them (`Round.counted`). So positions after a stop token are no
trials, neither hits nor misses. Draft tokens that max_new_tokens left no room for were never verified, hence no trials either. The first
token comes from the prefill and belongs to no round; a request that ended there has no tau.
"""

from collections.abc import Iterable, Mapping

from decoding.settings import Generation, Round

Ratios = dict[str, tuple[float, float]]
"""Metric name -> (numerator, denominator); added up over requests and workers, divided once where shown."""


def acceptance_metrics(generations: Iterable[Generation]) -> Ratios:
    """Count the acceptance metrics of some requests.

    Returns:
        tau: tokens committed / rounds, pooled over rounds; residual or bonus token included.
        tau_per_request: sum over requests of each one's own tau / requests with a round.
        accept_cond@k: rounds that accepted draft position k / rounds that accepted all before it and had it verified (k from 1).
        accept_prefix@k: rounds that accepted positions 1..k / rounds that had k verified (and did not stop before it).
        verify_rate: (accepted + 1) / (drafted + 1), summed over rounds; where an accepted draft is the stop token, it ends the round and
            there is no +1 on either side.
        verify_waste: draft tokens verified but rejected / draft tokens verified.
    """
    out: Ratios = dict.fromkeys(("tau", "tau_per_request", "verify_rate", "verify_waste"), (0.0, 0.0))

    def add(name: str, numerator: float, denominator: float) -> None:
        n, d = out.get(name, (0.0, 0.0))
        out[name] = (n + numerator, d + denominator)

    for generation in generations:
        committed = sum(r.committed for r in generation.rounds)
        add("tau", committed, len(generation.rounds))
        if generation.rounds:
            add("tau_per_request", committed / len(generation.rounds), 1)
        for r in generation.rounds:
            add("verify_rate", r.committed, r.counted + (0 if r.stopped_in_draft else 1))
            add("verify_waste", r.counted - r.accepted, r.counted)
            for k in range(1, r.counted + 1):
                if k <= r.accepted + 1:
                    add(f"accept_cond@{k}", k <= r.accepted, 1)
                add(f"accept_prefix@{k}", k <= r.accepted, 1)
    return out


def merge(parts: Iterable[Mapping[str, tuple[float, float]]]) -> Ratios:
    """Add up numerators and denominators of several parts."""
    out: Ratios = {}
    for part in parts:
        for name, (numerator, denominator) in part.items():
            n, d = out.get(name, (0.0, 0.0))
            out[name] = (n + numerator, d + denominator)
    return out


def divide(ratios: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
    """Return the figures to show; None where nothing was counted."""
    return {name: numerator / denominator if denominator else None for name, (numerator, denominator) in ratios.items()}


def threshold_counts(rounds: Iterable[Round], threshold: float) -> tuple[int, int]:
    """What would have been verified had drafts been cut before the first slot whose confidence is below a threshold.

    Slots that do not count in the recorded round (after a stop token) do not count here.

    Returns:
        (accepted, rejected) draft tokens; those after a rejection are rejected with it.
    """
    accepted = rejected = 0
    for r in rounds:
        below = (k for k, confidence in enumerate(r.confidence) if confidence < threshold)
        verified = min(next(below, r.counted), r.counted)
        accepted += min(r.accepted, verified)
        rejected += verified - min(r.accepted, verified)
    return accepted, rejected
