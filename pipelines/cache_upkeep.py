"""What `python -m pipelines.cache` does besides caching: `--stat`, `--verify` and `--gc`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from actors.answers import AnswerStore
from actors.cluster import ClusterSettings, cluster
from actors.recheck import RecheckRecipe, recheck_problems, recheck_rows
from pipelines.job import JobError, finish, progress, tell
from pipelines.target import Target
from storage.commits import Commit, read_commits
from storage.contract import Contract, differences, load_contract
from storage.manifest import Manifest
from storage.object_store import ObjectStore
from storage.shard import Entry
from storage.upkeep import (
    check_commits,
    check_manifests,
    check_shards,
    column_bytes,
    find_garbage,
    length_histogram,
    published_bytes,
    remove_garbage,
    skipped_by_reason,
)

GIB, MIB = 2**30, 2**20
_SHOWN = 50  # problems on the screen; the result file has all


class UpkeepConfig(BaseModel):
    """See conf/cache.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    age_hours: float = Field(ge=0)
    stat_rows: int = Field(ge=1)
    verify_rows: int = Field(ge=0)
    verify_threads: int = Field(ge=1)
    seed: int


def stat(cache: ObjectStore, config: UpkeepConfig, path: Path) -> None:
    """Say what is in the cache. Needs neither the target's files nor an engine."""
    contract = load_contract(cache)
    commits = read_commits(cache)
    manifest = Manifest.from_commits(commits)
    tokens, stored = int(manifest.tokens.sum()), sum(shard.bytes for commit in commits for shard in commit.shards)
    capture, hidden = contract.capture, contract.target.hidden_size
    published = published_bytes(len(capture.layer_ids), hidden)
    sampled_tokens, columns = column_bytes(cache, contract, manifest, config.stat_rows, config.seed)
    skipped, histogram = skipped_by_reason(commits), length_histogram(manifest)
    garbage = find_garbage(cache, time.time() - 3600 * config.age_hours)
    loose = [*garbage.old, *garbage.young]
    finish(
        f"cache {cache.settings.root}",
        {
            "rows": f"{len(manifest)} cached in {len(commits)} commits and {len(manifest.shards)} shards, {skipped.total()} skipped",
            "skipped": ", ".join(f"{count} {reason}" for reason, count in skipped.most_common()) or "none",
            "tokens": f"{tokens}, {int(manifest.supervised.sum())} of them supervised",
            "bytes": f"{stored / MIB:.1f} MiB, {stored / max(tokens, 1):.0f} a token",
            "codec": f"{capture.codec}: {stored / max(tokens, 1) / published:.3f} of the published layout's {published} bytes a token",
            f"columns, {min(config.stat_rows, len(manifest))} rows": ", ".join(
                f"{name} {size / max(sampled_tokens, 1):.0f}" for name, size in columns.items()
            ),
            "lengths": "\n".join(_bars(histogram)) or "none",
            "uncommitted": f"{len(loose)} shards, {sum(found.bytes for found in loose) / MIB:.1f} MiB" if loose else "nothing",
        },
        {
            "cache": cache.settings.root,
            "manifest": manifest.hash,
            "rows": len(manifest),
            "tokens": tokens,
            "supervised": int(manifest.supervised.sum()),
            "commits": len(commits),
            "shards": len(manifest.shards),
            "bytes": stored,
            "bytes_per_token": stored / max(tokens, 1),
            "published_bytes_per_token": published,
            "of_published_layout": stored / max(tokens, 1) / published,
            "codec": capture.codec,
            "column_bytes_per_token": {name: size / max(sampled_tokens, 1) for name, size in columns.items()},
            "columns_from_rows": min(config.stat_rows, len(manifest)),
            "lengths": [{"from": low, "to": high, "rows": rows} for low, high, rows in histogram],
            "skipped": dict(skipped),
            "uncommitted": [asdict(found) for found in loose],
        },
        path,
    )


def _bars(histogram: Sequence[tuple[int, int, int]]) -> list[str]:
    most = max((rows for _, _, rows in histogram), default=1)
    return [f"{low:>6} to {high:<6} {'█' * round(24 * rows / most) or ('▏' if rows else '')} {rows}" for low, high, rows in histogram]


def gc(cache: ObjectStore, config: UpkeepConfig, path: Path) -> None:
    """Remove what belongs to no commit and is older than `upkeep.age_hours`; exit with 1 if a commit claimed something meanwhile."""
    load_contract(cache)  # of another folder nothing is deleted
    before = time.time() - 3600 * config.age_hours
    garbage = find_garbage(cache, before)
    removed = remove_garbage(cache, garbage, before)
    kept = sum(found.bytes for found in garbage.young)
    for name in removed.lost:
        tell(f"{cache.url(name)} was committed while it was removed. Delete that commit and the manifests, and run `cache` again")
    finish(
        f"garbage of {cache.settings.root}",
        {
            "removed": f"{removed.shards} uncommitted shards, {removed.bytes / MIB:.1f} MiB",
            "uploads": f"{removed.uploads} abandoned multi-part uploads aborted",
            "kept": f"{len(garbage.young)} uncommitted shards, {kept / MIB:.1f} MiB: younger than {config.age_hours:g} h",
        },
        {
            "cache": cache.settings.root,
            "removed": [found.key for found in garbage.old],
            "removed_shards": removed.shards,
            "removed_bytes": removed.bytes,
            "aborted_uploads": removed.uploads,
            "kept": [found.key for found in garbage.young],
            "age_hours": config.age_hours,
            "lost": list(removed.lost),
        },
        path,
    )
    if removed.lost:
        sys.exit(1)


def verify(
    cache: ObjectStore,
    answers: AnswerStore,
    target: Target,
    recipe: RecheckRecipe,
    ray: ClusterSettings,
    config: UpkeepConfig,
    path: Path,
) -> None:
    """Read everything, recompute a random sample of rows, and exit with 1 if anything is wrong."""
    contract = load_contract(cache)
    started = time.perf_counter()
    other = [
        f"contract: {found.field} is {found.theirs!r} in the cache, {found.ours!r} in the target's files"
        for found in differences(target.identity, contract.target, "target.")
    ]
    commits, found = check_commits(cache)
    problems = [*other, *found, *check_manifests(cache, commits)]
    bad, samples = _read_shards(cache, contract, commits, config.verify_threads)
    problems += [line for lines in bad.values() for line in lines]
    intact = [(shard.name, entry) for commit in commits for shard in commit.shards if shard.name not in bad for entry in shard.entries]
    draw = np.random.default_rng(config.seed)
    chosen = [intact[number] for number in sorted(draw.choice(len(intact), min(config.verify_rows, len(intact)), replace=False))]
    problems += _answer_problems(answers, chosen)
    checks = []
    if chosen and not other:  # another model's states say nothing of these
        capture = contract.capture
        engine = replace(recipe.engine, layer_ids=capture.layer_ids, max_length=capture.max_length)
        with cluster(ray), progress() as bar:
            task = bar.add_task("recomputing rows", total=len(chosen), note="the engine starts")
            for check in recheck_rows(replace(recipe, contract=contract, engine=engine), chosen):
                checks.append(check)
                bar.update(task, advance=1, note="")
        problems += recheck_problems(checks, capture.codec)
    for problem in problems[:_SHOWN]:
        tell(problem)
    worst = max((check.error for check in checks), default=float("nan"))
    agreeing, predicted = sum(check.agreeing for check in checks), sum(check.predicted for check in checks)
    finish(
        f"verified {cache.settings.root}",
        {
            "result": f"{len(problems)} problems" if problems else "whole: nothing is wrong",
            "read": f"{samples} samples in {sum(len(commit.shards) for commit in commits)} shards of {len(commits)} commits",
            "recomputed": f"{len(checks)} rows: at most {worst:.4f} apart; {agreeing} of {predicted} next tokens agree"
            if checks
            else "no rows",
            "time": f"{time.perf_counter() - started:.0f} s",
        },
        {
            "cache": cache.settings.root,
            "problems": problems,
            "commits": len(commits),
            "samples": samples,
            "recomputed": [asdict(check) for check in checks],
            "largest_error": None if not checks else worst,
            "agreeing": agreeing,
            "predicted": predicted,
            "seconds": time.perf_counter() - started,
        },
        path,
    )
    if problems:
        sys.exit(1)


def _read_shards(cache: ObjectStore, contract: Contract, commits: Sequence[Commit], threads: int) -> tuple[dict[str, list[str]], int]:
    """(problems by shard, samples that were read and decoded)"""
    bad: dict[str, list[str]] = {}
    samples, total = 0, sum(shard.bytes for commit in commits for shard in commit.shards)
    with progress() as bar:
        task: Any = bar.add_task("reading, MiB", total=-(-total // MIB), note="")
        done = 0
        for shard, problems in check_shards(cache, contract, commits, threads):
            done += shard.bytes
            samples += len(shard.entries)
            if problems:
                bad[shard.name] = problems
            bar.update(task, completed=-(-done // MIB), note=f"[red]{len(bad)} bad shards[/]" if bad else "")
    return bad, samples


def _answer_problems(answers: AnswerStore, chosen: Sequence[tuple[str, Entry]]) -> list[str]:
    """Whether the sampled rows stand at their place in the answers, as far as those are here."""
    problems = []
    for _, entry in chosen:
        if entry.index < answers.rows:
            (row,) = answers.read(entry.index, entry.index + 1)
            if row.row_id != entry.row_id or len(row.masked().input_ids) != entry.tokens:
                problems.append(
                    f"row {entry.row_id} (index {entry.index}): the answers hold row {row.row_id} there: the cache is of other answers"
                )
    return problems


def require_cache(cache: ObjectStore) -> None:
    """JobError where nothing has been committed: there is nothing to look at."""
    load_contract(cache)
    if not cache.list("commits/"):
        raise JobError(f"{cache.settings.root} holds no commit yet. Run `python -m pipelines.cache` with the same target and corpus.")
