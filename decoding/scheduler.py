"""How many draft tokens of each request to verify, from their survival and the cost of a pass (DSpark paper, algorithm 1).

R requests, a[r, j] = probability that draft tokens 1..j+1 of request r are all accepted, so never rising along a row. A pass over B tokens
(one anchor and the chosen drafts of each request) is made SPS(B) times a second, whole rounds counted. Throughput of a choice is
Theta = (R + sum of chosen a) * SPS(B).

Lossless scheduling must not let a token's own value, nor anything drafted after it, decide whether it is verified. c_k of slot k depends
on the tokens before slot k only, so a rule is lossless if it decides over slot k from confidences up to slot k of the same request. All
rules of this file but `capacity` on present confidences do.
"""

import numpy as np


def throughput_optimal(survival: np.ndarray, limits: np.ndarray, sps: np.ndarray) -> np.ndarray:
    """Algorithm 1: admit draft tokens by falling survival while throughput rises, and stop at the first that does not raise it.

    The early stop is what keeps verification lossless: looking past it would let a later token of the same request decide whether this one
    is verified (paper, appendix A).

    Args:
        survival: [R, g] calibrated, never rising along a row.
        limits: [R] int, tokens of each request that may be verified at most.
        sps: [> R + R * g] passes a second by tokens in the pass; entries below R are not read.

    Returns:
        [R] int64 prefix lengths. Of equal survivals the earlier position goes first, then the earlier request.
    """
    candidates = _falling(survival, limits)
    requests = len(survival)
    theta = (requests + np.cumsum(candidates)) * sps[requests + 1 : requests + 1 + len(candidates)]
    before = np.concatenate(([requests * sps[requests]], theta[:-1]))
    fails = theta <= before
    admitted = int(fails.argmax()) if fails.any() else len(candidates)
    return top_prefixes(survival, limits, admitted, candidates)


def capacity(survival: np.ndarray, limits: np.ndarray, sps: np.ndarray) -> int:
    """Draft tokens in all that maximize throughput, searched over the whole jagged table (the smallest number of equals).

    Lossless only on confidences of past rounds; arguments as for `throughput_optimal`.
    """
    candidates = _falling(survival, limits)
    requests = len(survival)
    tau = requests + np.concatenate(([0.0], np.cumsum(candidates)))
    return int((tau * sps[requests : requests + len(tau)]).argmax())


def top_prefixes(survival: np.ndarray, limits: np.ndarray, count: int, falling: np.ndarray | None = None) -> np.ndarray:
    """The `count` likeliest draft tokens of a batch, as prefix lengths.

    Args:
        survival, limits: as for `throughput_optimal`.
        count: draft tokens in all, fewer if there are not so many that may survive.
        falling: the candidates' survivals in falling order, where already known.

    Returns:
        [R] int64. Of equal survivals the earlier position goes first, then the earlier request.
    """
    values = _open(survival, limits).ravel() if falling is None else falling
    count = min(count, int((values > 0).sum()))
    if count <= 0:
        return np.zeros(len(survival), dtype=np.int64)
    # The last admitted value splits each row: what lies above it is in, what equals it is in as far as there is room.
    last = np.partition(values, len(values) - count)[len(values) - count] if falling is None else falling[count - 1]
    lengths = np.minimum((survival > last).sum(1), limits)
    equal = np.minimum((survival >= last).sum(1), limits) - lengths
    room = count - int(lengths.sum())
    if room == int(equal.sum()):
        return lengths + equal
    rows, slots = np.repeat(np.arange(len(survival)), equal), _counted_up(equal) + np.repeat(lengths, equal)
    taken = rows[np.lexsort((rows, slots))[:room]]
    return lengths + np.bincount(taken, minlength=len(survival))


def above_threshold(conditional: np.ndarray, limits: np.ndarray, threshold: float) -> np.ndarray:
    """Verify each request's tokens up to the first whose conditional confidence c_k ([R, g]) lies below `threshold`."""
    passed = conditional >= threshold
    lengths = np.where(passed.all(1), passed.shape[1], passed.argmin(1)) if passed.shape[1] else np.zeros(len(passed), dtype=np.int64)
    return np.minimum(lengths, limits)


def _falling(survival: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Positive survivals of the tokens within the limits, in falling order."""
    values = np.sort(_open(survival, limits), axis=None)
    return values[np.searchsorted(values, 0.0, side="right") :][::-1]


def _open(survival: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Survivals with 0 past the limits."""
    width = survival.shape[1]
    return survival if (limits >= width).all() else np.where(np.arange(width) < limits[:, None], survival, 0.0)


def _counted_up(counts: np.ndarray) -> np.ndarray:
    """0, 1, .., counts[0] - 1, 0, 1, .., counts[1] - 1, ..."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
