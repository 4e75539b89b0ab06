"""Which drafters an evaluation compares: runs by name, folders, checkpoints on the hub, or none; each checked against the target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actors.decoder import PLAIN
from actors.drafter import OpenedDrafter, open_drafter
from actors.engines.model_files import Notify, resolve_model
from pipelines.job import JobError
from pipelines.target import Target
from storage.contract import Contract, require_match
from storage.object_store import ObjectStore, StorageSettings
from storage.places import Places, checked_name
from storage.target_files import load_head_weights


@dataclass(frozen=True)
class Choice:
    """One drafter, or plain decoding.

    Attributes:
        place: of its results, below the output folder.
        store: where its files lie; None for plain decoding.
        facts: its configuration and captured layers, as plain data.
        contract: what it was trained on, where that is known.
    """

    place: str
    store: ObjectStore | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    layer_ids: tuple[int, ...] = ()
    contract: Contract | None = None

    @property
    def shape(self) -> dict[str, int | str]:
        """What sets it apart in a comparison: kind, layers, block length."""
        if self.store is None:
            return {"kind": "plain decoding", "layers": 0, "block_length": 0}
        head = self.facts["head"]
        kind = self.facts["algorithm"] + (f", {head} head" if head != "none" else "")
        return {"kind": kind, "layers": self.facts["num_layers"], "block_length": self.facts["block_length"]}


def chosen_drafters(
    runs: Sequence[str], others: Sequence[str], places: Places, store: ObjectStore, target: Target, notify: Notify
) -> dict[str, Choice]:
    """The drafters by the names that reports give them, in order: runs, then others, then PLAIN.

    Args:
        runs: names of trained runs of this target and corpus, or PLAIN.
        others: folders (of a drafter that `train` left, or a checkpoint in DeepSpec's format), storage URLs of such, or hub ids.

    Raises:
        JobError: a name comes twice, nothing is chosen, or a drafter is not this target's.
    """
    chosen: dict[str, Choice] = {}
    for name in runs:
        if name == PLAIN:
            _add(chosen, PLAIN, Choice(f"{target.config.name}/{places.corpus}"))
            continue
        place = places.run(name)
        _add(chosen, name, _run(store.child(f"{place}/drafter"), target, place))
    for given in others:
        name = checked_name(given.rstrip("/").rpartition("/")[2], "the drafter's name")
        _add(chosen, name, _other(given, name, target, places, notify))
    if PLAIN in chosen:
        chosen[PLAIN] = chosen.pop(PLAIN)  # last: the report is about the first
    if not chosen:
        raise JobError("no drafter is named. Give run=NAME, runs=[NAME,...] or drafter=FOLDER.")
    return chosen


def _add(chosen: dict[str, Choice], name: str, choice: Choice) -> None:
    if name in chosen:
        raise JobError(f"drafter {name!r} is named twice. Give each once; folders go by their last part.")
    chosen[name] = choice


def _run(folder: ObjectStore, target: Target, place: str) -> Choice:
    if not folder.exists("contract.json"):
        raise JobError(f"{folder.settings.root} holds no finished drafter. Run `python -m pipelines.train` with this run's name first.")
    return _checked(open_drafter(folder), folder, target, place)


def _other(given: str, name: str, target: Target, places: Places, notify: Notify) -> Choice:
    # A folder of `train` has a config.json too, so that both kinds pass for model folders.
    root = given if "://" in given else str(resolve_model(given, None, "", notify))
    folder = ObjectStore(StorageSettings(root))
    return _checked(open_drafter(folder), folder, target, f"{target.config.name}/drafters/{name}")


def _checked(opened: OpenedDrafter, folder: ObjectStore, target: Target, place: str) -> Choice:
    where = folder.settings.root
    if opened.contract is not None:
        require_match(target.identity, opened.contract.target, where, "Evaluate a drafter with the target that it was trained for")
        if not opened.config.chain and opened.config.mask_token_id != target.mask_token_id:
            raise JobError(
                f"{where} was trained with mask token {opened.config.mask_token_id}, this run has {target.mask_token_id}: "
                f"set target.mask_token={opened.config.mask_token_id}"
            )
    else:
        _require_targets_head(opened, where, target)
    layers = target.identity.num_layers
    if not opened.config.kind.context == "last_hidden" and any(not -1 <= layer < layers - 1 for layer in opened.layer_ids):
        raise JobError(f"{where} reads layers {list(opened.layer_ids)}, which this target of {layers} layers does not give.")
    facts = {**opened.config.to_dict(), "layer_ids": list(opened.layer_ids)}
    return Choice(place, folder, opened.tensors, facts, opened.layer_ids, opened.contract)


def _require_targets_head(opened: OpenedDrafter, where: str, target: Target) -> None:
    """A checkpoint without a contract proves by its copies of embedding and LM head whose drafter it is."""
    head = load_head_weights(target.folder)
    for name, theirs, ours in (("embedding", opened.embedding, head.embedding), ("LM head", opened.lm_head, head.lm_head)):
        if theirs is not None and (theirs.shape != ours.shape or not torch.equal(theirs.to(ours.dtype), ours)):
            raise JobError(
                f"the {name} in {where} differs from that of {target.config.model}: this drafter belongs to another target. "
                "Name the one that it was trained for with target=..."
            )
    if (opened.config.vocab_size, opened.config.hidden_size) != tuple(head.embedding.shape):
        raise JobError(
            f"{where} was made for a vocabulary of {opened.config.vocab_size} and hidden size {opened.config.hidden_size}, "
            f"{target.config.model} has {list(head.embedding.shape)}."
        )
