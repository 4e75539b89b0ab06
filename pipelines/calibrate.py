"""Fit a drafter's confidences to what the target accepts, on held-out prompts: `python -m pipelines.calibrate run=dspark_markov`."""

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import hydra
import numpy as np
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

from actors.cluster import cluster
from actors.decoder import Prompt
from actors.recorder import decode_groups
from decoding.calibration import (
    Calibrator,
    MeanQuality,
    drifting,
    fit_temperatures,
    mean_quality,
    position_quality,
    reliability,
)
from decoding.policies import BlockLength
from decoding.rounds import RecordedRounds
from decoding.settings import Generation, SamplingSettings
from pipelines.calibration_report import CalibrationFindings, DomainQuality, calibration_page
from pipelines.drafted import DraftedJob
from pipelines.evaluation_report import machine
from pipelines.job import JobError, finish, launch, mendable, notices, progress, write_bytes
from pipelines.machine import git_revision
from pipelines.page import percent, write_page
from pipelines.report_data import Bin, Reliability
from pipelines.target import Target, describe
from storage.calibration import (
    CalibrationIdentity,
    CalibrationRecord,
    ShorterBlocks,
    calibration_identity,
    save_calibration,
)
from storage.checkpoint import DrafterFiles
from storage.object_store import ObjectStore

ENOUGH = 30_000  # rounds; with fewer the noise floor is near the error that is wanted


class CalibrateConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    temperature: float = Field(ge=0, le=2)
    max_new_tokens: int = Field(ge=2)
    prompts: int | None = Field(ge=2)
    rounds: int = Field(ge=1)
    max_passes: int = Field(ge=1)
    fit_share: float = Field(gt=0, lt=1)
    bins: int = Field(ge=2)
    seed: int
    batch_size: int = Field(ge=1)
    block_lengths: tuple[Annotated[int, Field(ge=1)], ...] | None
    block_rounds: int = Field(ge=1)
    rounds_file: Path | None


class CalibrateJob(DraftedJob):
    calibrate: CalibrateConfig


@hydra.main(config_path="../conf", config_name="calibrate", version_base=None)
@mendable
def main(cfg: DictConfig) -> None:
    job = CalibrateJob.from_config(cfg)
    store = job.open_store()
    target, files = job.open_drafter(store)
    if not files.config.get("confidence"):
        raise JobError(f"{job.run} has no confidence head, so there is nothing to calibrate. Train one with +experiment=dspark_markov.")
    identity = calibration_identity(job.drafter_store(store), files, job.calibrate.temperature)
    folder = job.output / job.places.run(job.run) / "calibration"
    lengths = shorter_lengths(job.calibrate, files.layout.block_length)
    rounds, recorded, blocks = have_rounds(job, store, target, files, identity, folder, lengths)
    fitted, measured = by_prompt(rounds, job.calibrate.fit_share, job.calibrate.seed)
    if not fitted.tried[:, 0].any() or not measured.tried[:, 0].any():
        raise JobError("too few rounds to fit on some prompts and measure on others: give more prompts, or more calibrate.max_new_tokens")
    calibrator = fit_temperatures(fitted.confidence, fitted.survived, fitted.tried, job.calibrate.bins)
    positions = position_quality(measured, calibrator, job.calibrate.bins)
    quality = mean_quality(len(measured), positions)
    domains = domain_qualities(measured, calibrator, job.calibrate.bins)
    diagrams = reliabilities(measured, calibrator, job.calibrate.bins)
    shorter = [shorter_blocks(length, own, rounds, calibrator, job.calibrate.bins) for length, own in blocks.items()]
    save_calibration(
        job.drafter_store(store),
        CalibrationRecord(
            identity,
            job.corpus.name,
            len(fitted),
            calibrator.temperatures,
            quality.ece_before,
            quality.ece_after,
            quality.floor,
            acceptance(rounds),
            tuple(shorter),
        ),
    )
    warnings = warnings_of(quality, domains)
    for warning in warnings:
        notices.print(f"[yellow]warning[/]: {warning}", soft_wrap=True)
    findings = CalibrationFindings(
        title=f"Confidence of {job.run} for {job.target.name}",
        fitted=len(fitted),
        calibrator=calibrator,
        block=rounds.block,
        diagrams=diagrams,
        positions=positions,
        quality=quality,
        domains=domains,
        acceptance=acceptance(rounds),
        shorter=shorter,
        notes=warnings,
        bins=job.calibrate.bins,
        facts={
            "target": job.target.model,
            "drafter": f"{job.run}, weights {identity.drafter[:16]}",
            "decoding": f"temperature {job.calibrate.temperature:g}, at most {job.calibrate.max_new_tokens} new tokens, {job.engine.dtype}",
            "corpus": f"held-out prompts of {job.corpus.name}, {len(np.unique(rounds.prompt))} of them",
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            "git revision": git_revision() or "not in a git checkout",
            "command": f"python -m pipelines.calibrate {shlex.join(sys.argv[1:])}",
        },
    )
    page = write_page(calibration_page(findings), folder)
    finish(
        f"confidence of {job.run} for {job.target.name}, temperature {job.calibrate.temperature:g}",
        {
            "rounds": f"{len(fitted):,} to fit, {len(measured):,} on other prompts to measure",
            "temperatures": " ".join(f"{value:.2f}" for value in calibrator.temperatures),
            "mean ECE": f"{percent(quality.ece_before)} before, {percent(quality.ece_after)} after; "
            f"a perfect calibrator shows {percent(quality.floor)} by chance",
            "ECE@k": " ".join(percent(one.ece_after) for one in positions),
            "AUROC@k": " ".join(f"{one.auroc_after:.2f}" for one in positions),
            **{
                f"blocks of {one.length}": "survive "
                + " ".join(percent(value) for value in one.acceptance)
                + ", whole blocks "
                + " ".join(percent(value) for value in one.whole)
                for one in shorter
            },
            "recorded": str(recorded),
            "report": str(page),
        },
        {
            "target": describe(target),
            "run": job.run,
            "settings": job.calibrate.model_dump(mode="json"),
            "temperatures": calibrator.temperatures,
            "fitted_rounds": len(fitted),
            "measured": asdict(quality),
            "positions": [asdict(one) for one in positions],
            "domains": [asdict(one) for one in domains],
            "drafter": identity.drafter,
            "reliability": [asdict(one) for one in diagrams],
            "acceptance": acceptance(rounds),
            "shorter_blocks": [{**asdict(one), "ratios": one.ratios} for one in shorter],
            "warnings": warnings,
            "rounds_file": str(recorded),
            "report": str(page),
        },
        folder / "calibrate.json",
    )


def have_rounds(
    job: CalibrateJob,
    store: ObjectStore,
    target: Target,
    files: DrafterFiles,
    identity: CalibrationIdentity,
    folder: Path,
    lengths: Sequence[int],
) -> tuple[RecordedRounds, Path, dict[int, RecordedRounds]]:
    """Rounds from the file that was given, else decoded here (groups recorded before are taken over); the file that holds them; and
    rounds of shorter blocks by their length, which a file does not bring.
    """
    facts = {"drafter": identity.drafter, "temperature": identity.temperature, "corpus": job.corpus.name}
    given = job.calibrate.rounds_file
    if given is not None:
        if not given.is_file():
            raise JobError(f"calibrate.rounds_file={given} is not a file")
        rounds = RecordedRounds.from_bytes(given.read_bytes(), str(given))
        different = [
            f"{name} {rounds.facts.get(name)!r}, this run {facts[name]!r}" for name in facts if rounds.facts.get(name) != facts[name]
        ]
        if different:
            raise JobError(f"{given} was recorded with {'; '.join(different)}. Record rounds anew, without calibrate.rounds_file.")
        if lengths:
            notices.print("shorter blocks are not measured from calibrate.rounds_file: the draft gate will make whole blocks only")
        return rounds, given, {}
    conversations, prompts = job.heldout(store, target, job.calibrate.prompts)
    decode = _Decoding(job, store, target, files, prompts, [one.domain for one in conversations], facts, folder / "passes")
    rounds = decode.rounds()
    path = folder / "rounds.npz"
    write_bytes(path, rounds.to_bytes())
    return rounds, path, {length: decode.shorter(length, len(rounds) / rounds.requests) for length in lengths}


@dataclass(frozen=True)
class _Decoding:
    """Passes over the prompts, each with random draws of its own, until there are rounds enough; every group is kept as it ends."""

    job: CalibrateJob
    store: ObjectStore
    target: Target
    files: DrafterFiles
    prompts: Sequence[Prompt]
    domains: Sequence[str]
    facts: dict[str, object]
    folder: Path

    @property
    def key(self) -> str:
        settings = self.job.calibrate
        how = (settings.temperature, settings.max_new_tokens, settings.seed, settings.batch_size, self.job.engine.dtype)
        return self.job.drafter_key(self.store, *how, prompts=self.prompts)

    def rounds(self) -> RecordedRounds:
        """Of whole blocks."""
        settings = self.job.calibrate
        # Greedy decoding says the same each time.
        passes = 1 if settings.temperature == 0 else settings.max_passes
        parts: list[RecordedRounds] = []
        while len(parts) < passes and sum(map(len, parts)) < settings.rounds:
            parts.append(self._pass(self.prompts, len(parts), f"pass {len(parts) + 1}, for the rounds"))
        return RecordedRounds.joined(parts)

    def shorter(self, length: int, rounds_each: float) -> RecordedRounds:
        """Blocks of `length` on so many of the prompts as give rounds enough; those cut off by the end of a text are left out.

        Args:
            rounds_each: rounds of whole blocks that a prompt's text takes. Shorter blocks take more.
        """
        prompts = self.prompts[: math.ceil(self.job.calibrate.block_rounds / rounds_each)]
        decoded = self._pass(prompts, 0, f"with blocks of {length}", BlockLength(length))
        return decoded.select(decoded.drafted == length)

    def _pass(self, prompts: Sequence[Prompt], number: int, note: str, policy: BlockLength | None = None) -> RecordedRounds:
        """Every prompt once. Its groups are kept as they end, and those that were kept before are read."""
        settings = self.job.calibrate
        size = settings.batch_size
        starts = range(0, len(prompts), size)
        kind = f"pass-{number}" if policy is None else f"blocks-of-{policy.length}"
        key = self.key
        paths = {start: self.folder / f"{key}-{kind}-{start}-{len(prompts[start : start + size])}.npz" for start in starts}
        missing = [start for start in starts if not paths[start].is_file()]
        before = len(prompts) - sum(len(prompts[start : start + size]) for start in missing)
        if missing:
            # Another pass is another seed, so that it draws other texts.
            sampling = SamplingSettings(
                settings.temperature, settings.max_new_tokens, self.target.template.stop_ids, settings.seed + number
            )
            with cluster(self.job.cluster), progress() as bar:
                task = bar.add_task("decoding", total=len(prompts), completed=before, note=note)
                decoded = decode_groups(
                    str(self.target.folder),
                    self.job.run,
                    self.job.drafter_store(self.store),
                    [prompts[start : start + size] for start in missing],
                    sampling,
                    self.job.engine.settings(self.job.cluster, size),
                    policy,
                )
                for group, generations in decoded:
                    start = missing[group]
                    write_bytes(paths[start], self._recorded(generations, start).to_bytes())
                    bar.update(task, advance=len(generations))
        return RecordedRounds.joined([RecordedRounds.from_bytes(path.read_bytes(), str(path)) for path in paths.values()])

    def _recorded(self, generations: Sequence[Generation], start: int) -> RecordedRounds:
        """Rounds of a group that begins with the prompt number `start`."""
        chosen = slice(start, start + len(generations))
        return RecordedRounds.from_generations(
            generations,
            self.files.layout.block_length,
            [prompt.number for prompt in self.prompts[chosen]],
            self.domains[chosen],
            [len(prompt.token_ids) for prompt in self.prompts[chosen]],
            dict(self.facts),
        )


def by_prompt(rounds: RecordedRounds, share: float, seed: int) -> tuple[RecordedRounds, RecordedRounds]:
    """Rounds to fit to and rounds to measure on, of different prompts, each domain cut alike."""
    random = np.random.default_rng(seed)
    fitting: set[int] = set()
    for domain in np.unique(rounds.domain):
        own = random.permutation(np.unique(rounds.prompt[rounds.domain == domain]))
        fitting |= set(own[: max(round(share * len(own)), 1)].tolist())
    chosen = np.isin(rounds.prompt[rounds.request], sorted(fitting))
    return rounds.select(chosen), rounds.select(~chosen)


def domain_qualities(rounds: RecordedRounds, calibrator: Calibrator, bins: int) -> list[DomainQuality]:
    """Each domain by itself: temperatures fitted to all of them may fit one badly."""
    found = []
    for domain in np.unique(rounds.domain).tolist():
        own = rounds.select(rounds.domain[rounds.request] == domain)
        if len(own):
            positions = position_quality(own, calibrator, bins)
            quality = mean_quality(len(own), positions)
            found.append(DomainQuality(domain, quality, positions, drifting(quality), diagram(domain, own, own.tried, calibrator, bins)))
    return found


def acceptance(rounds: RecordedRounds) -> tuple[float, ...]:
    """accept_prefix@k of all rounds."""
    trials = np.maximum(rounds.tried.sum(0), 1)
    return tuple(((rounds.survived & rounds.tried).sum(0) / trials).tolist())


def reliabilities(rounds: RecordedRounds, calibrator: Calibrator, bins: int) -> list[Reliability]:
    """A diagram of each position, before and after scaling."""
    slots = np.arange(rounds.block)
    return [diagram(f"position {k + 1}", rounds, rounds.tried & (slots == k), calibrator, bins) for k in slots.tolist()]


def diagram(label: str, rounds: RecordedRounds, counted: np.ndarray, calibrator: Calibrator, bins: int) -> Reliability:
    """Of the prefixes that count ([N, g] bool, all of them tried)."""
    confidence = np.where(rounds.tried, rounds.confidence, 0.5)

    def binned(one: Calibrator) -> tuple[Bin, ...]:
        found = reliability(one.survival(confidence)[counted], rounds.survived[counted], bins)
        filled = zip(found.counts.tolist(), found.predicted.tolist(), found.observed.tolist(), strict=True)
        return tuple(Bin(*values) for values in filled if values[0])

    return Reliability(label, binned(Calibrator.identity(rounds.block)), binned(calibrator))


def shorter_lengths(config: CalibrateConfig, block: int) -> list[int]:
    """Which shorter blocks to measure: as asked, else the shortest and half the length."""
    asked = (1, block // 2) if config.block_lengths is None else config.block_lengths
    too_long = [length for length in asked if length > block]
    if too_long:
        raise JobError(f"calibrate.block_lengths: {too_long} exceed the drafter's block of {block}")
    return sorted({length for length in asked if 0 < length < block})


def shorter_blocks(length: int, own: RecordedRounds, whole: RecordedRounds, calibrator: Calibrator, bins: int) -> ShorterBlocks:
    """Acceptance of shorter blocks beside that of whole ones on the same prompts."""
    same = whole.select(np.isin(whole.prompt[whole.request], own.prompt))
    positions = position_quality(own, calibrator, bins)[:length]
    return ShorterBlocks(length, len(own), acceptance(own)[:length], acceptance(same)[:length], mean_quality(len(own), positions).ece_after)


def warnings_of(quality: MeanQuality, domains: Sequence[DomainQuality]) -> list[str]:
    """What a reader must know before trusting the figures."""
    told = []
    if quality.rounds < ENOUGH:
        told.append(
            f"{quality.rounds:,} rounds to measure on are few ({ENOUGH:,} are wanted): a perfect calibrator would show a mean ECE of "
            f"{percent(quality.floor)} by chance alone. Raise calibrate.rounds, calibrate.max_passes or the number of prompts."
        )
    for one in domains:
        if one.drifts:
            told.append(
                f"domain {one.domain} drifts: its mean ECE is {percent(one.quality.ece_after)} where chance explains at most "
                f"{percent(one.quality.floor_high)}. The common temperatures do not fit it; calibrate on its prompts if it is served."
            )
    if not math.isnan(quality.ece_after) and quality.ece_after > quality.ece_before:
        told.append("the temperatures make the mean ECE worse on other prompts than those they were fitted to: there were too few rounds.")
    return told


if __name__ == "__main__":
    launch(main)
