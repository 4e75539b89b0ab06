"""Reads a target model's folder: its configuration, its identity for the contract, and the weights that drafters share with it.

One loader for the target's head, strict: what is missing, doubtful or of another shape is an error; nothing is ever initialised here.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from storage.contract import TargetIdentity
from storage.errors import StorageError

ABSENT = "absent"

_INDEX = "model.safetensors.index.json"
# Where the text model sits: text-only checkpoints, then the two spellings of multimodal ones.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
_TOKENIZER_SETTINGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "bos_token", "eos_token", "pad_token", "unk_token")
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class HeadWeights:
    """What a drafter shares with its target, in the dtype of the checkpoint.

    Args:
        embedding: [E, H], E embedding rows (padding included).
        final_norm: [H], as stored: Gemma 1 to 3 multiply by 1 + w.
        lm_head: [E, H]; the same tensor as embedding where the target ties them.
    """

    embedding: Tensor
    final_norm: Tensor
    lm_head: Tensor


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder as a dict; a multimodal one is unwrapped to its text_config.

    What the text part leaves to the outer document (architectures, tie_word_embeddings) is carried over.
    """
    path = Path(folder) / "config.json"
    document = _read_json(path)
    text = document.get("text_config")
    if text is None:
        config = document
    elif isinstance(text, dict):
        outer: dict[str, Any] = {name: document[name] for name in ("architectures", "tie_word_embeddings") if name in document}
        config = {**outer, **text}
    else:
        raise StorageError(f"{path}: text_config must be an object")
    for name in ("hidden_size", "num_hidden_layers"):
        if type(config.get(name)) is not int:
            raise StorageError(f"{path} gives no {name}: this is not the configuration of a decoder model that can be a target")
    return config


def target_identity(folder: str | Path, id: str, revision: str | None = None) -> TargetIdentity:
    """Identity of a target from its files alone (DESIGN, section 4.1).

    The weights' fingerprint is a hash over all safetensors headers and a sample of their bytes, so that it costs no full read.

    Raises:
        StorageError: a file is missing or unreadable, or the tokenizer has ids that the embedding lacks.
    """
    folder = Path(folder)
    config = read_model_config(folder)
    weights = _WeightFiles(folder)
    rows = weights.shape(weights.text_prefix + "embed_tokens.weight")[0]
    vocabulary = _tokenizer_size(folder)
    if vocabulary is not None and vocabulary > rows:
        raise StorageError(f"{folder}: the tokenizer has {vocabulary} ids, the embedding {rows} rows: they do not belong together")
    softcap = config.get("final_logit_softcapping")
    return TargetIdentity(
        id=id,
        config_hash=_config_hash(_read_json(folder / "config.json")),
        weights_fingerprint=weights.fingerprint(),
        revision=revision,
        tokenizer_hash=_tokenizer_hash(folder),
        chat_template_hash=_chat_template_hash(folder),
        vocab_size=rows if vocabulary is None else vocabulary,
        embedding_rows=rows,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        embedding_scale=embedding_scale(config),
        logit_softcap=None if softcap is None else float(softcap),
        logit_multiplier=logit_multiplier(config),
    )


def embedding_scale(config: dict[str, Any]) -> float:
    """Factor on the embedding's output: Gemma's sqrt(H) in bf16, as a bf16 model applies it; Granite's embedding_multiplier; else 1."""
    if str(config.get("model_type", "")).startswith("gemma"):
        return float(torch.tensor(math.sqrt(config["hidden_size"])).to(torch.bfloat16))
    return float(config.get("embedding_multiplier", 1.0))


def logit_multiplier(config: dict[str, Any]) -> float:
    """Factor on the logits: Cohere's logit_scale, the inverse of Granite's logits_scaling, else 1."""
    if "logits_scaling" in config:
        return 1.0 / float(config["logits_scaling"])
    return float(config.get("logit_scale", 1.0))


def load_head_weights(folder: str | Path) -> HeadWeights:
    """Embedding, final norm and LM head of a target, from one or several safetensors files.

    Raises:
        StorageError: a tensor is missing, of the wrong shape, not finite, or the configuration leaves open which head is the right one.
    """
    config = read_model_config(folder)
    weights = _WeightFiles(Path(folder))
    hidden = config["hidden_size"]
    prefix = weights.text_prefix
    embedding = weights.load(prefix + "embed_tokens.weight")
    if embedding.ndim != 2 or embedding.shape[1] != hidden:
        raise StorageError(f"{folder}: {prefix}embed_tokens.weight is {list(embedding.shape)}, the configuration says [*, {hidden}]")
    if "vocab_size" in config and len(embedding) != config["vocab_size"]:
        raise StorageError(f"{folder}: the embedding has {len(embedding)} rows, the configuration says vocab_size {config['vocab_size']}")
    norm = weights.load(prefix + "norm.weight")
    if norm.shape != (hidden,):
        raise StorageError(f"{folder}: {prefix}norm.weight is {list(norm.shape)}, the configuration says [{hidden}]")
    head = _lm_head(weights, config, embedding)
    for name, tensor in (("embedding", embedding), ("final norm", norm), ("LM head", head)):
        # A sum is finite only if every term is; float32 keeps it from overflowing.
        if not math.isfinite(float(tensor.sum(dtype=torch.float32))):
            raise StorageError(f"{folder}: the {name} holds NaN or infinite values: the file is damaged")
    return HeadWeights(embedding, norm, head)


def load_layer_weights(folder: str | Path, layer: int) -> dict[str, Tensor]:
    """All tensors of one decoder layer (0-based), by their name inside the layer, e.g. `self_attn.q_proj.weight`."""
    config = read_model_config(folder)
    if not 0 <= layer < config["num_hidden_layers"]:
        raise StorageError(f"{folder} has decoder layers 0..{config['num_hidden_layers'] - 1}, there is no layer {layer}")
    weights = _WeightFiles(Path(folder))
    prefix = f"{weights.text_prefix}layers.{layer}."
    found = {name.removeprefix(prefix): weights.load(name) for name in weights.names if name.startswith(prefix)}
    if not found:
        raise StorageError(f"{folder}: no tensor begins with {prefix}: the weights are incomplete or of an unknown layout")
    return found


def _lm_head(weights: "_WeightFiles", config: dict[str, Any], embedding: Tensor) -> Tensor:
    stored = [name for name in _HEADS if name in weights.names]
    gemma = str(config.get("model_type", "")).startswith("gemma")
    tied = config.get("tie_word_embeddings", True if gemma else None)
    if len(stored) > 1:
        raise StorageError(f"{weights.folder}: there are several LM heads: {', '.join(stored)}")
    if not stored:
        if tied:
            return embedding
        reason = "tie_word_embeddings is false" if tied is False else "tie_word_embeddings is not given"
        raise StorageError(f"{weights.folder} has no lm_head.weight, and {reason} in its configuration: the weights are incomplete")
    head = weights.load(stored[0])
    if head.shape != embedding.shape:
        raise StorageError(f"{weights.folder}: {stored[0]} is {list(head.shape)}, the embedding {list(embedding.shape)}")
    if not tied:
        return head
    if not torch.equal(head, embedding):
        raise StorageError(f"{weights.folder}: tie_word_embeddings is set, yet {stored[0]} differs from the embedding: one must be wrong")
    return embedding


class _WeightFiles:
    """The safetensors files of a folder, single or sharded, by tensor name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / _INDEX
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise StorageError(f"{index} has no weight_map")
            self.files = sorted({folder / str(name) for name in weight_map.values()})
        else:
            self.files = sorted(folder.glob("*.safetensors"))
            weight_map = None
        if not self.files:
            raise StorageError(f"{folder} holds no *.safetensors file: give a model folder with safetensors weights")
        self._where: dict[str, Path] = {}
        self._headers: dict[Path, tuple[dict[str, Any], bytes]] = {}
        for path in self.files:
            header, raw = _read_header(path)
            self._headers[path] = header, raw
            for name in header:
                if name in self._where:
                    raise StorageError(f"{folder}: tensor {name} is in both {self._where[name].name} and {path.name}")
                self._where[name] = path
        missing = sorted(set(weight_map or ()) - self._where.keys())
        if missing:
            raise StorageError(f"{folder}: {_INDEX} names {missing[0]} and {len(missing) - 1} more tensors that no file holds")

    @property
    def names(self) -> list[str]:
        return sorted(self._where)

    @property
    def text_prefix(self) -> str:
        """What precedes `embed_tokens.weight` of the text model; StorageError unless exactly one known spelling is there."""
        found = [prefix for prefix in _PREFIXES if prefix + "embed_tokens.weight" in self._where]
        if len(found) != 1:
            problem = "no" if not found else f"{len(found)} candidates for the"
            raise StorageError(
                f"{self.folder}: {problem} token embedding; known names are {', '.join(p + 'embed_tokens.weight' for p in _PREFIXES)}"
            )
        return found[0]

    def shape(self, name: str) -> list[int]:
        return list(self._headers[self._path(name)][0][name]["shape"])

    def load(self, name: str) -> Tensor:
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise StorageError(f"{path}: {name} is {tensor.dtype}: quantized weights are not supported, give the model in bf16 or float")
        return tensor

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            raw = self._headers[path][1]
            size = path.stat().st_size
            digest.update(f"{path.name}\n{size}\n".encode() + raw)
            first, room = 8 + len(raw), size - 8 - len(raw)
            with path.open("rb") as file:
                for number in range(_SAMPLES):
                    file.seek(first + max(0, room - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def _path(self, name: str) -> Path:
        if name not in self._where:
            raise StorageError(f"{self.folder}: the weights lack {name}")
        return self._where[name]


def _read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """(tensors by name, header bytes) of a safetensors file, whose length is checked against the header."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            raw = file.read(length) if length <= size else b""
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        raise StorageError(f"{path} is missing: the download is incomplete") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is not a readable safetensors file: {error}") from error
    if end != size:
        raise StorageError(f"{path} is truncated: {size} of {end} bytes. Fetch it again")
    return header, raw


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"{path} is missing: {path.parent} is not a complete model folder") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} must hold a JSON object")
    return document


def _config_hash(document: dict[str, Any]) -> str:
    """Hash over everything in the configuration but what says nothing about the model, at any depth."""

    def stable(value: Any) -> Any:
        return {name: stable(item) for name, item in value.items() if name not in _VOLATILE} if isinstance(value, dict) else value

    return hashlib.sha256(json.dumps(stable(document), sort_keys=True).encode()).hexdigest()


def _tokenizer_hash(folder: Path) -> str:
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        return ABSENT
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        document = _read_json(settings)
        digest.update(json.dumps({name: document.get(name) for name in _TOKENIZER_SETTINGS}, sort_keys=True).encode())
    return digest.hexdigest()


def _tokenizer_size(folder: Path) -> int | None:
    """Highest token id plus one, from tokenizer.json; None where the folder has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    document = _read_json(path)
    vocabulary = (document.get("model") or {}).get("vocab") or {}
    highest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    return 1 + max([highest, *(token["id"] for token in document.get("added_tokens") or [])])


def _chat_template_hash(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    settings = folder / "tokenizer_config.json"
    template = _read_json(settings).get("chat_template") if settings.is_file() else None
    if not template:
        return ABSENT
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
