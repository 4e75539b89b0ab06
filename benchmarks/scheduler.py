"""Cost of one scheduling decision: `python benchmarks/scheduler.py`.

Survivals are products of random confidences, the cost table has cliffs. Times are medians over many calls on other numbers each, so that
nothing is warm but the code.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from decoding.calibration import Calibrator
from decoding.scheduler import above_threshold, capacity, throughput_optimal, top_prefixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    print(json.dumps([measure(requests, given.block, given.calls) for requests in given.requests], indent=1))


def measure(requests: int, block: int, calls: int) -> dict[str, object]:
    """Microseconds of each rule."""
    random = np.random.default_rng(requests)
    tokens = np.arange(requests * (block + 1) + 2)
    sps = 1 / (0.02 + 1e-5 * tokens + 2e-3 * (tokens // 64))
    limits = np.full(requests, block)
    confidence = [random.beta(4, 1.5, (requests, block)) for _ in range(32)]
    calibrator = Calibrator((1.5,) * block)
    survival = [calibrator.survival(one) for one in confidence]
    rules: dict[str, Callable[[int], object]] = {
        "algorithm 1": lambda i: throughput_optimal(survival[i], limits, sps),
        "asynchronous": lambda i: top_prefixes(survival[i], limits, capacity(survival[i - 1], limits, sps)),
        "threshold": lambda i: above_threshold(confidence[i], limits, 0.6),
        "calibration": lambda i: calibrator.survival(confidence[i]),
    }
    return {"requests": requests, **{name: median_and_fastest(rule, calls) for name, rule in rules.items()}}


def median_and_fastest(call: Callable[[int], object], calls: int) -> list[float]:
    """Microseconds; on a busy machine trust the fastest."""
    times = []
    for number in range(calls + 10):
        started = time.perf_counter()
        call(number % 32)
        times.append(time.perf_counter() - started)
    return [round(value * 1e6, 1) for value in (statistics.median(times[10:]), min(times[10:]))]


if __name__ == "__main__":
    main()
