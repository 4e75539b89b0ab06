"""The target by name: conf names in any usual spelling, hub ids, local folders; and what is derived where a conf is silent."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field

from actors.engines.model_files import Notify, resolve_model
from actors.errors import ActorError
from corpus.template import ChatTemplate
from storage.contract import TargetIdentity
from storage.target_files import read_model_config, target_identity

CONF = Path(__file__).parent.parent / "conf" / "target"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class UnknownTarget(Exception):
    """No target of that name."""


class SamplingConfig(BaseModel):
    """How the target answers: its recommended sampling parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    temperature: float = Field(ge=0.0, le=2.0)
    top_p: float = Field(gt=0.0, le=1.0)
    top_k: int = Field(ge=0)
    min_p: float = Field(ge=0.0, le=1.0)
    max_new_tokens: int = Field(ge=1)


class TargetConfig(BaseModel):
    """One file of conf/target."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    model: str
    revision: str | None
    hidden_size: int | None
    num_layers: int | None
    layer_ids: tuple[int, ...] | None
    mask_token: int | str | None
    model_cache: str
    sampling: SamplingConfig
    enable_thinking: bool

    def load_template(self, notify: Notify) -> ChatTemplate:
        """The tokenizer and chat template alone, for jobs that need no weights.

        Raises:
            ActorError: the model's files cannot be had.
        """
        return ChatTemplate(resolve_model(self.model, self.revision, self.model_cache, notify, weights=False))

    def resolve(self, notify: Notify) -> "Target":
        """Fetch the target's files and fill in what the conf leaves open.

        Raises:
            ActorError: the model cannot be had.
            UnknownTarget: a layer id or the mask token does not exist in this model.
        """
        folder = resolve_model(self.model, self.revision, self.model_cache, notify)
        config = read_model_config(folder)
        template = ChatTemplate(folder)
        layers = int(config["num_hidden_layers"])
        for name, known, found in (("hidden_size", self.hidden_size, config["hidden_size"]), ("num_layers", self.num_layers, layers)):
            if known not in (None, found):
                raise UnknownTarget(f"target.{name}={known}, but {folder / 'config.json'} says {found}: correct the one or the other")
        layer_ids = tuple(sorted(self.layer_ids)) if self.layer_ids is not None else default_layer_ids(layers)
        # The final layer is not allowed: its output is what `last_hidden` already holds.
        wrong = [layer for layer in layer_ids if not -1 <= layer < layers - 1]
        if wrong or len(set(layer_ids)) != len(layer_ids):
            raise UnknownTarget(f"target.layer_ids={list(layer_ids)}: ids must be distinct and in -1..{layers - 2} for {self.model}")
        mask = mask_token_id(self.mask_token, template, int(config["vocab_size"]))
        if self.layer_ids is None or self.mask_token is None:
            notify(f"derived for {self.name}: layer_ids={list(layer_ids)}, mask token id {mask}")
        return Target(self, folder, target_identity(folder, self.model, self.revision), layer_ids, mask, template)

    def shape(self, notify: Notify) -> tuple[int, int]:
        """(hidden size, captured layers) without any weights: from the conf, else from the model's own config.json.

        Raises:
            ActorError: neither is to be had.
        """
        hidden, layers = self.hidden_size, self.num_layers
        if hidden is None or layers is None:
            try:
                folder = resolve_model(self.model, self.revision, self.model_cache, notify, weights=False)
            except ActorError as error:
                raise ActorError(f"{error} Or say its size: target.hidden_size=... and target.num_layers=...") from error
            config = read_model_config(folder)
            hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        return hidden, len(self.layer_ids if self.layer_ids is not None else default_layer_ids(layers))


@dataclass(frozen=True)
class Target:
    """A target whose files lie on this machine."""

    config: TargetConfig
    folder: Path
    identity: TargetIdentity
    layer_ids: tuple[int, ...]
    mask_token_id: int
    template: ChatTemplate


def default_layer_ids(layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly from decoder layer 1 to N-3, as in the released drafters (36 layers: 1, 9, 17, 25, 33); fewer in a very shallow model."""
    first = min(1, layers - 2)
    last = max(layers - 3, first)
    return tuple(sorted({int(first + (last - first) * step / (count - 1) + 0.5) for step in range(count)}))


def mask_token_id(given: int | str | None, template: ChatTemplate, vocab_size: int) -> int:
    """The token that stands for "not yet known" in a draft block.

    By rule: the conf's, else the first embedding row that no token uses, else a special token that calls itself reserved or unused.
    Never pad or eos: the drafter would meet them in real text.
    """
    vocabulary = template.vocabulary()
    if isinstance(given, str):
        if given not in vocabulary:
            raise UnknownTarget(f"target.mask_token={given!r} is not in the tokenizer's vocabulary")
        return vocabulary[given]
    if given is not None:
        if not 0 <= given < vocab_size:
            raise UnknownTarget(f"target.mask_token={given} is outside the vocabulary of {vocab_size}")
        return given
    first_spare = max(vocabulary.values()) + 1
    if first_spare < vocab_size:
        return first_spare
    named = sorted(token_id for token, token_id in vocabulary.items() if re.fullmatch(r"<\|?(reserved|unused)[\w|]*>", token))
    if named:
        return named[0]
    raise UnknownTarget(
        "this vocabulary has no spare row and no reserved token: name a special token that no text holds, `target.mask_token=...`"
    )


def known_targets() -> dict[str, str]:
    """Conf name -> model, of every file in conf/target but `custom`."""
    files = sorted(path for path in CONF.glob("*.yaml") if path.stem != "custom")
    return {path.stem: str(yaml.safe_load(path.read_text())["model"]) for path in files}


def load_target_config(name: str) -> TargetConfig:
    """One file of conf/target by its name, outside of Hydra."""
    return TargetConfig.model_validate(OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=True))


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """Hydra overrides with `target=` in any usual spelling brought to a conf name, or to `custom` for a hub id or folder.

    Raises:
        UnknownTarget: with the known names and the nearest match.
    """
    overrides: list[str] = []
    for argument in arguments:
        if argument.startswith("target="):
            overrides += _target_overrides(argument.removeprefix("target="))
        else:
            overrides.append(argument)
    return overrides


def _target_overrides(given: str) -> list[str]:
    known = known_targets()
    if given == "custom":
        return ["target=custom"]
    organization, _, name = given.rpartition("/")
    spellings = {_plain(spelling): conf for conf, model in known.items() for spelling in (conf, model.rpartition("/")[2])}
    conf = spellings.get(_plain(name))
    # An organization or a folder says more than the name: `someone/Qwen3-8B` and `./qwen3_8b` are other models.
    if conf and (not organization or known[conf].rpartition("/")[0].lower() == organization.lower()):
        return [f"target={conf}"]
    path = Path(given).expanduser()
    if path.is_dir():
        return _custom(path.resolve().name, str(path.resolve()))
    if _HUB_ID.fullmatch(given):
        return _custom(name, given)
    near = difflib.get_close_matches(_plain(name), spellings, n=1, cutoff=0.4)
    hint = f" Did you mean {spellings[near[0]]}?" if near else ""
    raise UnknownTarget(f"there is no target {given!r}.{hint} Known: {', '.join(known)}; or give a hub id (ORG/NAME) or a local folder.")


def _custom(name: str, model: str) -> list[str]:
    plain = re.sub(r"[^a-z0-9._-]+", "_", name.lower()).strip("._-") or "model"
    return ["target=custom", f"target.name={plain}", f"target.model={quoted(model)}"]


def quoted(value: str) -> str:
    """A value as one of Hydra's quoted strings: only a quote, and the backslashes before one, are escaped."""
    escaped = re.sub(r'(\\*)(?="|$)', r"\1\1", value).replace('"', '\\"')
    return f'"{escaped}"'


def _plain(name: str) -> str:
    """`Qwen3-8B`, `qwen3_8b` and `QWEN3 8B` are one name; that a model follows instructions goes without saying."""
    return re.sub(r"[^a-z0-9]+", "", re.sub(r"[-_ ](it|instruct)$", "", name.lower()))


def describe(target: Target) -> dict[str, Any]:
    """What a result file says of the target."""
    return {
        "name": target.config.name,
        "model": target.config.model,
        "layer_ids": list(target.layer_ids),
        "mask_token_id": target.mask_token_id,
        "sampling": target.config.sampling.model_dump(),
    }
