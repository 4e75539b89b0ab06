"""From decoded prompts to the figures of a report: each drafter on each benchmark and domain, their macro average, gains, thresholds.

Uncertainty is that of the prompts: whole requests are drawn again (bootstrap), within each benchmark, since rounds of one request are not
independent and a macro average weighs every benchmark alike.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from actors.decoder import PLAIN, Decoded
from decoding.metrics import acceptance_metrics, threshold_counts
from decoding.settings import Generation
from pipelines.plain_data import ReportError
from pipelines.prompt_sets import PromptSet
from pipelines.report_data import Acceptance, DrafterResult, Estimate, Gain, Ratio, Score, Sweep, ThresholdPoint, Timing, bootstrap_tau

RESAMPLES = 2000
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))
Results = Mapping[str, Sequence[Decoded]]
"""A drafter's outcomes by prompt set."""


def score(name: str, domain: str, outcomes: Sequence[Decoded]) -> Score:
    """One drafter on some prompts."""
    generations = [outcome.drafted for outcome in outcomes]
    pooled, per_request = taus(generations)
    counted = acceptance_metrics(generations)
    return Score(
        name=name,
        domain=domain,
        prompts=len(outcomes),
        tokens=sum(len(generation.tokens) for generation in generations),
        rounds=sum(len(generation.rounds) for generation in generations),
        tau_pooled=pooled,
        tau_per_request=per_request,
        acceptance=Acceptance.from_metrics(name, counted),
        verify_rate=Ratio(*counted["verify_rate"]),
        verify_waste=Ratio(*counted["verify_waste"]),
        timing=timing(outcomes),
    )


def drafter_result(name: str, facts: Mapping[str, int | str], sets: Sequence[PromptSet], results: Results) -> DrafterResult:
    """One drafter on everything that was evaluated.

    Args:
        facts: `kind`, `layers` and `block_length` of the drafter.
    """
    domains = []
    for domain, outcomes in by_domain(sets, results).items():
        domains.append(score(domain, domain, outcomes))
    return DrafterResult(
        name=name,
        kind=str(facts["kind"]),
        layers=int(facts["layers"]),
        block_length=int(facts["block_length"]),
        benchmarks=tuple(score(part.name, part.domain, results[part.name]) for part in sets),
        domains=tuple(domains),
        tau_macro=tau_macro([results[part.name] for part in sets]),
    )


def by_domain(sets: Sequence[PromptSet], results: Results) -> dict[str, list[Decoded]]:
    """A drafter's outcomes by the domain of the prompts, domains by name."""
    found: dict[str, list[Decoded]] = {}
    for part in sets:
        for conversation, outcome in zip(part.conversations, results[part.name], strict=True):
            found.setdefault(conversation.domain, []).append(outcome)
    return dict(sorted(found.items()))


def taus(generations: Sequence[Generation]) -> tuple[Estimate, Estimate]:
    """(pooled over rounds, averaged over requests) with bootstrap intervals over requests."""
    committed, rounds = _counts(generations)
    return bootstrap_tau(committed.tolist(), rounds.tolist())


def tau_macro(parts: Sequence[Sequence[Decoded]], seed: int = 0) -> Estimate:
    """The mean over benchmarks of the pooled accepted length."""
    counts = [_counts([outcome.drafted for outcome in part]) for part in parts]
    return _estimate(_macro(counts, None), np.array([_macro(counts, drawn) for drawn in _draws(counts, seed)]))


def gains(sets: Sequence[PromptSet], outcomes: Mapping[str, Results], seed: int = 0) -> tuple[Gain, ...]:
    """How much longer the first drafter's accepted length is than each other one's, macro; the same prompts drawn for both."""
    names = [name for name in outcomes if name != PLAIN]
    counts = {name: [_counts([o.drafted for o in outcomes[name][part.name]]) for part in sets] for name in names}
    found = []
    for other in names[1:]:
        ours, theirs = counts[names[0]], counts[other]
        drawn = [_macro(ours, rows) / _macro(theirs, rows) - 1 for rows in _draws(ours, seed)]
        found.append(Gain(names[0], other, _estimate(_macro(ours, None) / _macro(theirs, None) - 1, np.array(drawn))))
    return tuple(found)


def threshold_sweeps(sets: Sequence[PromptSet], results: Results) -> tuple[Sweep, ...]:
    """What a static confidence threshold would have let through, by domain, replayed on the rounds in which whole blocks were verified.

    Exact for each recorded round; which rounds there are is taken from full verification (the paper's Figure 5).
    """
    sweeps = []
    for domain, outcomes in by_domain(sets, results).items():
        rounds = [round_ for outcome in outcomes for round_ in outcome.drafted.rounds]
        if not any(round_.confidence for round_ in rounds):
            continue
        points = [ThresholdPoint(threshold, len(rounds), *threshold_counts(rounds, threshold)) for threshold in THRESHOLDS]
        sweeps.append(Sweep(domain, tuple(points)))
    return tuple(sweeps)


def timing(outcomes: Sequence[Decoded]) -> Timing:
    """Whole requests, prompts included, with the drafter and plainly."""
    return Timing(
        plain_seconds=sum(outcome.plain.seconds.total for outcome in outcomes),
        plain_tokens=sum(len(outcome.plain.tokens) for outcome in outcomes),
        drafted_seconds=sum(outcome.drafted.seconds.total for outcome in outcomes),
        drafted_tokens=sum(len(outcome.drafted.tokens) for outcome in outcomes),
        draft_seconds=sum(outcome.drafted.seconds.draft for outcome in outcomes),
        head_seconds=sum(outcome.drafted.seconds.head for outcome in outcomes),
        verify_seconds=sum(outcome.drafted.seconds.verify for outcome in outcomes),
        prefill_seconds=sum(outcome.drafted.seconds.prefill for outcome in outcomes),
        plain_prefill_seconds=sum(outcome.plain.seconds.prefill for outcome in outcomes),
    )


Counts = tuple[np.ndarray, np.ndarray]
"""[R] tokens committed in rounds, [R] rounds, by request."""


def _counts(generations: Sequence[Generation]) -> Counts:
    committed = [sum(round_.committed for round_ in generation.rounds) for generation in generations]
    return np.array(committed, dtype=np.float64), np.array([len(generation.rounds) for generation in generations], dtype=np.float64)


def _draws(counts: Sequence[Counts], seed: int) -> list[list[np.ndarray]]:
    """For each resample, the requests drawn from each benchmark; the same ones for the same seed and numbers of prompts."""
    random = np.random.default_rng(seed)
    return [[random.integers(len(rounds), size=len(rounds)) for _, rounds in counts] for _ in range(RESAMPLES)]


def _macro(counts: Sequence[Counts], rows: Sequence[np.ndarray] | None) -> float:
    picked = counts if rows is None else [(tokens[row], rounds[row]) for (tokens, rounds), row in zip(counts, rows, strict=True)]
    if rows is None and any(not rounds.sum() for _, rounds in picked):
        raise ReportError("a benchmark had no verification round at all: every text ended with its first token")
    # A resample may hold only requests that ended at once; it then counts as one token a round.
    return float(np.mean([tokens.sum() / rounds.sum() if rounds.sum() else 1.0 for tokens, rounds in picked]))


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))
