"""The cost table: measured points kept, lines between them, files, staleness, learning while serving, and measuring on a decoder."""

import numpy as np
import pytest
from decoding_cases import LAYERS, tiny_drafter, tiny_model

from decoding.errors import DecodingError
from decoding.target import TransformersTarget
from decoding.throughput import Curve, OnlineTable, ThroughputTable, measure_curve, measured_points

BLOCK = 3


def curve(requests, scale=1.0):
    tokens = tuple(measured_points(requests, BLOCK, 5))
    seconds = tuple(scale * (0.1 + 0.01 * b + 0.05 * (b // 4)) for b in tokens)
    drafting = (0.0, 0.01 * requests, 0.02 * requests, 0.03 * requests)
    return Curve(requests, tokens, seconds, drafting, tuple(0.9 * value for value in drafting), 0.09 * scale)


def table(*requests, **values):
    options = {"context": 64, "block": BLOCK, "kind": "measured", "fingerprint": {"machine": "a", "torch": "2"}, **values}
    return ThroughputTable(tuple(curve(r) for r in requests), **options)


def test_measured_points_are_kept():
    ours = table(2, 8, 16)
    for one in ours.curves:
        assert ours.seconds(one.requests)[list(one.tokens)] == pytest.approx(one.seconds)
        assert ours.sps(one.requests)[list(one.tokens)] == pytest.approx(1 / np.array(one.seconds))
        assert len(ours.sps(one.requests)) >= one.requests * (BLOCK + 1) + 1


def test_between_curves_seconds_run_straight_at_equal_tokens_a_request():
    ours = table(2, 8)
    for share in (1, 2, 4):
        expected = (ours.seconds(2)[2 * share] + ours.seconds(8)[8 * share]) / 2
        assert ours.seconds(5)[5 * share] == pytest.approx(expected)
    assert ours.draft_seconds(5, 2) == pytest.approx((ours.curves[0].draft_seconds[2] + ours.curves[1].draft_seconds[2]) / 2)
    assert ours.plain_seconds(5) == pytest.approx(0.09)
    assert ours.draft_seconds(0, 2) == 0
    assert (ours.seconds(1)[1:5] > 0).all()
    assert (ours.seconds(64)[64:] > ours.seconds(8)[32]).all()


def test_one_curve_depends_on_the_tokens_alone():
    ours = table(4)
    for requests in (2, 4, 9):
        both = [b for b in ours.curves[0].tokens if requests <= b <= requests * (BLOCK + 1)]
        assert ours.seconds(requests)[both] == pytest.approx([ours.curves[0].seconds[ours.curves[0].tokens.index(b)] for b in both])


def test_a_table_comes_back_from_its_file():
    ours = table(2, 8)
    back = ThroughputTable.from_json(ours.to_json(), "table.json")
    assert back.to_json() == ours.to_json()
    assert back.curves == ours.curves
    for wrong in (
        "",
        "[]",
        '{"format": 3}',
        ours.to_json().replace('"block": 3', '"block": 4'),
        ours.to_json().replace('"kind"', '"sort"'),
    ):
        with pytest.raises(DecodingError, match=r"table\.json"):
            ThroughputTable.from_json(wrong, "table.json")


@pytest.mark.parametrize(
    "curves",
    [
        (),
        (curve(4), curve(2)),
        (Curve(4, (5, 8), (1.0, 2.0), (0.0,) * 4, (0.0,) * 4, 1.0),),
        (Curve(4, (4, 8), (1.0, 0.0), (0.0,) * 4, (0.0,) * 4, 1.0),),
        (Curve(4, (4, 8), (1.0, 2.0), (0.0,) * 4, (0.0,) * 3, 1.0),),
    ],
)
def test_a_table_that_cannot_be_is_refused(curves):
    with pytest.raises(DecodingError, match="cost table"):
        ThroughputTable(curves, 64, BLOCK, "measured")


def test_a_table_of_another_machine_is_stale():
    ours = table(2)
    assert ours.differences({"machine": "a", "torch": "2"}) == []
    assert ours.differences({"machine": "b", "torch": "2"}) == ["machine: measured with a, here b"]
    assert len(ours.differences({"machine": "a"})) == 1


def test_online_ratios_follow_what_rounds_take():
    ours = OnlineTable(table(8), memory=60)
    assert ours.sps(8) == pytest.approx(ours.table.sps(8))
    random = np.random.default_rng(0)
    truth = lambda tokens: 1.5 if tokens < 16 else 3.0  # noqa: E731
    for _ in range(400):
        tokens = int(random.integers(8, 33))
        ours.observe(8, tokens, float(ours.table.seconds(8)[tokens]) * truth(tokens) * random.uniform(0.9, 1.1))
    found = ours.table.sps(8)[8:33] / ours.sps(8)[8:33]
    assert found[:6] == pytest.approx(1.5, rel=0.25)
    assert found[12:] == pytest.approx(3.0, rel=0.25)
    for _ in range(400):  # the neighbour leaves
        tokens = int(random.integers(8, 33))
        ours.observe(8, tokens, float(ours.table.seconds(8)[tokens]))
    assert ours.table.sps(8)[8:33] / ours.sps(8)[8:33] == pytest.approx(1.0, rel=0.1)


def test_what_was_never_seen_shifts_with_the_rest():
    ours = OnlineTable(table(8))
    for _ in range(20):
        ours.observe(8, 8, 2 * float(ours.table.seconds(8)[8]))
    assert ours.sps(8)[8:33] == pytest.approx(ours.table.sps(8)[8:33] / 2)


def test_measuring_a_decoder():
    model = tiny_model("llama")
    drafter = tiny_drafter("llama", "markov", block_length=BLOCK)
    target = TransformersTarget(model, LAYERS)
    found = measure_curve(target, drafter, requests=3, context=30, points=4, rounds=3, warmup=1, temperature=1.0)
    assert found.tokens == (3, 6, 9, 12)
    assert len(found.draft_seconds) == BLOCK + 1
    assert found.draft_seconds[0] == found.block_seconds[0] == 0
    assert len(found.block_seconds) == BLOCK + 1
    assert min(found.block_seconds[1:]) > 0
    assert found.block_seconds[BLOCK] == found.draft_seconds[BLOCK], "a block of g tokens is a whole one"
    assert all(0 < found.draft_seconds[-1] < seconds for seconds in found.seconds)
    ours = ThroughputTable((found,), 30, BLOCK, "measured")
    assert (ours.sps(3)[3:] > 0).all()
