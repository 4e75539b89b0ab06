"""Everything about a training run that can be checked before a worker starts: each mistake is one clear line."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch

from actors.answers import AnswerStore, frequent_tokens
from actors.drafter import drafter_config, open_drafter
from actors.engines.model_files import resolve_model
from actors.train_recipe import CHECKPOINTS, FOLLOWS, RANDOM, TARGET_LAYERS, TrainRecipe, TrainSettings, recipe_facts
from drafters.config import config_from_target
from pipelines.job import JobError, notices
from pipelines.target import Target
from pipelines.train_config import TrainJob
from storage.contract import Contract, load_contract, require_match
from storage.errors import ContractMismatch
from storage.follow import FollowSettings
from storage.manifest import Manifest, split_manifest
from storage.object_store import ObjectStore
from storage.target_files import read_model_config

GIB = 2**30
RUN = "run.json"
"""In a run's folder: what data and settings it was started with."""
# A drafter's weights do not depend on these; a chain has no masked slots.
_MAY_DIFFER = ("drafter.window:", "drafter.block_length:")
_MAY_DIFFER_IN_A_CHAIN = (*_MAY_DIFFER, "drafter.mask_token_id:")


def make_recipe(job: TrainJob, target: Target, store: ObjectStore, pinned: Manifest | None = None) -> TrainRecipe:
    """Everything checked that can be before a worker starts: contract, layers, shapes, batch.

    Args:
        pinned: read this manifest of the cache; None for what is committed now.
    """
    cache = store.child(job.places.cache)
    contract = load_contract(cache)
    require_match(
        target.identity, contract.target, cache.settings.root, "Use the target that the cache was built with, or build another cache"
    )
    if contract.capture.layer_ids != target.layer_ids:
        raise JobError(
            f"{cache.settings.root} holds layers {list(contract.capture.layer_ids)}, this run asks for {list(target.layer_ids)}. "
            f"Use target.layer_ids={list(contract.capture.layer_ids)}, or build another cache."
        )
    if contract.capture.mask_token_id not in (None, target.mask_token_id):
        raise JobError(
            f"{cache.settings.root} leaves out rows with mask token {contract.capture.mask_token_id}, not those with this run's, "
            f"{target.mask_token_id}. Use target.mask_token={contract.capture.mask_token_id}, or build another cache."
        )
    layers = _layers(job, contract)
    options = job.drafter.changes()
    if job.train.follow:
        if job.drafter.draft_vocab_size is not None:
            raise JobError("drafter.draft_vocab_size counts the training rows' tokens, which train.follow=true leaves open")
        rows = AnswerStore(store.child(job.places.answers)).rows
        follow, manifest_hash, samples = FollowSettings(rows, 60 * job.train.follow_patience_minutes), FOLLOWS, None
    else:
        manifest = pinned or Manifest.current(cache)
        if pinned is None:
            manifest.save(cache)
        training, _ = split_manifest(manifest, job.train.heldout_rows)
        follow, manifest_hash, samples = None, manifest.hash, len(training)
        if (size := job.drafter.draft_vocab_size) is not None:
            answers, trained = AnswerStore(store.child(job.places.answers)), set(training.table["row_id"].to_pylist())
            if not answers.rows:
                raise JobError(
                    f"drafter.draft_vocab_size={size} takes the most frequent tokens of the answers, and {answers.store.settings.root} "
                    "holds none"
                )
            options["draft_vocabulary"] = frequent_tokens(answers, trained, target.template.stop_ids, size, target.identity.vocab_size)
    settings, start = job.train.settings(samples), None
    if settings.start not in (RANDOM, TARGET_LAYERS):
        start = start_folder(settings.start, job)
        settings = dataclasses.replace(settings, start=start.settings.root)
        there = drafter_config(start).to_dict()
        del there["captured_layers"]  # what the cache says
        options = there | options  # what no option says of an architecture is as it is there
    model_config = read_model_config(target.folder)
    options["mask_token_id"] = target.mask_token_id
    config = config_from_target(model_config, len(layers or contract.capture.layer_ids), **options)
    if config.kind.context == "last_hidden" and contract.capture.last_hidden_rows != "all":
        raise ContractMismatch(
            f"{cache.settings.root} does not match this run. capture.last_hidden_rows: it has {contract.capture.last_hidden_rows!r}, "
            f"{config.algorithm} needs 'all', since it attends to every position's last hidden state. Remove that cache and build it with "
            "cache.last_hidden_rows=all: every drafter can be trained on it"
        )
    room = int(model_config["max_position_embeddings"])
    if settings.decode is not None and contract.capture.max_length + settings.decode.max_new_tokens > room:
        raise JobError(
            f"train.decode.max_new_tokens={settings.decode.max_new_tokens} after up to {contract.capture.max_length} tokens exceed the "
            f"target's {room} positions: ask for fewer"
        )
    return TrainRecipe(
        cache=cache,
        run=store.child(job.places.run(job.run.name)),
        contract=contract,
        manifest_hash=manifest_hash,
        model=str(target.folder),
        drafter=config,
        settings=settings,
        follow=follow,
        start=start,
        layers=layers,
    )


def _layers(job: TrainJob, contract: Contract) -> tuple[int, ...] | None:
    """Which of the cached layers the drafter reads; None for all.

    Raises:
        JobError: one is not cached, or named twice.
    """
    asked, cached = job.drafter.layer_ids, contract.capture.layer_ids
    if asked is None or tuple(sorted(asked)) == cached:
        return None
    if not asked or not set(asked) <= set(cached) or len(set(asked)) != len(asked):
        raise JobError(f"drafter.layer_ids={list(asked)} must be distinct ones of the cached layers {list(cached)}")
    return tuple(sorted(asked))


def start_folder(named: str, job: TrainJob) -> ObjectStore:
    """The folder of the drafter that training goes on from: a local one, one on the job's kind of storage, or of a hub id."""
    root = named if "://" in named else str(resolve_model(named, None, "", notices.print))
    return ObjectStore(dataclasses.replace(job.storage, root=root))


def check_start(recipe: TrainRecipe, weights: Mapping[str, torch.Size]) -> str | None:
    """That the drafter to go on from is of this kind and reads the same states; a line where it was trained on another target's.

    Raises:
        JobError: it differs in anything but window and block length, or reads other layers.
        ActorError, StorageError, DrafterError: it is no drafter, or damaged.
    """
    if recipe.start is None:
        return None
    where, opened = recipe.start.settings.root, open_drafter(recipe.start)
    ours, theirs = (json.loads(json.dumps(config.to_dict())) for config in (recipe.drafter, opened.config))
    may_differ = _MAY_DIFFER_IN_A_CHAIN if recipe.drafter.chain else _MAY_DIFFER
    found = [line for line in differences(ours, theirs, "drafter") if not line.startswith(may_differ)]
    if recipe.drafter.kind.context != "last_hidden":
        found += differences(list(recipe.layer_ids), list(opened.layer_ids), "capture.layer_ids")
    found += [
        f"{name}: there {list(opened.tensors[name].shape) if name in opened.tensors else 'nothing'}, now {list(shape)}"
        for name, shape in weights.items()
        if name not in opened.tensors or opened.tensors[name].shape != shape
    ]
    if found:
        raise JobError(f"train.start={where} is another kind of drafter ({'; '.join(found)}). Use its settings, or start at random")
    if opened.contract is not None and opened.contract.target.weights_fingerprint != recipe.contract.target.weights_fingerprint:
        return f"{where} was trained for other weights of the target; it goes on with these"
    return None


def check_division(settings: TrainSettings, workers: int, fresh: bool) -> str | None:
    """That workers and micro-batches share a global batch evenly.

    Returns:
        A line where they do not, but a run that has begun goes on all the same: its result does not depend on how the batch is shared.

    Raises:
        JobError: they do not, in a new run or with slices of the weights on each worker, which must gather them equally often.
    """
    share, rest = divmod(settings.global_batch, workers)
    if share == 0:
        raise JobError(
            f"train.global_batch={settings.global_batch} gives {workers} workers less than a sample each: raise it, or lower workers.count"
        )
    if rest == 0 and share % min(settings.micro_batch, share) == 0:
        return None
    uneven = (
        f"train.global_batch={settings.global_batch} cannot be shared evenly by {workers} workers in micro-batches of "
        f"train.micro_batch={settings.micro_batch}"
    )
    if fresh or settings.parallel == "fsdp":
        raise JobError(f"{uneven}: make it a multiple of {workers * settings.micro_batch}, or change workers.count or train.micro_batch")
    return f"{uneven}: some workers wait for the others"


def check_disk(recipe: TrainRecipe, weights: Mapping[str, torch.Size]) -> None:
    """That the checkpoints of a run fit the disk, where storage is one.

    Raises:
        JobError: says how much is needed and how much there is.
    """
    free = recipe.run.free_bytes()
    if free is None:
        return
    size = 4 * sum(shape.numel() for shape in weights.values())
    # Weights and both moments, the average; the newest ones, the best, the one that is being written; and the drafter.
    needed = size * (3 + bool(recipe.settings.ema)) * (recipe.settings.keep_checkpoints + 2) + size
    held = sum(stored.bytes for stored in recipe.run.details(CHECKPOINTS))
    if needed - held > free:
        raise JobError(
            f"{recipe.run.settings.root}: checkpoints need {needed / GIB:.1f} GiB, {(free + held) / GIB:.1f} are free. Make room, choose "
            "another storage.root, or keep fewer (train.keep_checkpoints)"
        )


def claim(recipe: TrainRecipe) -> None:
    """Bind the run's folder to its data and settings.

    Raises:
        JobError: it was started with others; names each.
    """
    if not check_claim(recipe):
        recipe.run.put(RUN, json.dumps(recipe_facts(recipe), indent=2).encode())


def check_claim(recipe: TrainRecipe) -> bool:
    """Whether the run's folder is bound already, to this data and these settings.

    Raises:
        JobError: it was started with others; names each.
    """
    ours = json.loads(json.dumps(recipe_facts(recipe)))
    try:
        theirs = json.loads(recipe.run.get(RUN))
    except FileNotFoundError:
        return False
    if differing := differences(ours, theirs):
        raise JobError(
            f"{recipe.run.settings.root} was started otherwise ({'; '.join(differing)}). "
            "Use the same settings to go on, or another name: `run.name=...`."
        )
    return True


def differences(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """Dotted names of the fields in which two JSON documents differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            line for key in sorted({*ours, *theirs}) for line in differences(ours.get(key), theirs.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if ours == theirs else [f"{name}: there {theirs!r}, now {ours!r}"]
