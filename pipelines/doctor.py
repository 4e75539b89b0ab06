"""Say what this machine can do and what to do about what is missing: `python -m pipelines.doctor`."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import hydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from pipelines.machine_checks import INSTALL, Finding, Machine, check_machine, first_line

SIGNS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}

# Only light modules above: `pipelines.job` brings Ray and torch, and this job has to speak where one of them is broken.


@hydra.main(config_path="../conf", config_name="doctor", version_base=None)
def main(cfg: DictConfig) -> None:
    try:
        machine = machine_of(cfg)
    except OmegaConfBaseException as error:
        Console(stderr=True, highlight=False).print("[red]error[/]: config:", first_line(error), soft_wrap=True)
        sys.exit(2)
    sys.exit(examine(machine))


def machine_of(cfg: DictConfig) -> Machine:
    """The part of the config that the checks look at. Raises OmegaConfBaseException where a value is missing or malformed."""
    root = str(cfg.storage.root)
    return Machine(
        output=Path(cfg.output).expanduser(),
        storage_root=root if "://" in root else str(Path(root).expanduser()),
        endpoint_url=cfg.storage.endpoint_url,
        region=cfg.storage.region,
        model_cache=Path(cfg.target.model_cache).expanduser(),
        start_ray=bool(cfg.start_ray),
        import_vllm=bool(cfg.import_vllm),
    )


def examine(machine: Machine, broken: BaseException | None = None) -> int:
    """Run the checks, show them, and write the result file.

    Args:
        machine: where to look.
        broken: why the other jobs cannot even be imported, if so.

    Returns:
        Exit code: 1 where something fails that `make demo` needs.
    """
    notices, output = Console(stderr=True, highlight=False), Console(highlight=False)
    findings: list[Finding] = []
    if broken is not None:
        found = f"the jobs do not start: {type(broken).__name__}: {first_line(broken)}"
        findings.append(Finding("project", "fail", found, f"see the lines below; else {INSTALL}"))
    with notices.status("looking around ..."):
        findings += check_machine(machine)
    output.print(table_of(findings))
    output.print(verdict(findings))
    path = machine.output.absolute() / "doctor.json"
    ready = demo_ready(findings)
    try:
        write_result(path, findings)
    except OSError as error:
        notices.print(f"[red]error[/]: cannot write {path}: {error.strerror}. Choose another folder with `output=...`.", soft_wrap=True)
        return 1
    print(f"result: {path}", flush=True)
    return 0 if ready else 1


def table_of(findings: Iterable[Finding]) -> Table:
    """The findings as a table, what to do below what was found."""
    from rich.markup import escape

    table = Table(title="This machine", title_justify="left", show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = escape(finding.found)
        if finding.remedy:
            text += f"\n[cyan]→ {escape(finding.remedy)}[/]"
        table.add_row(SIGNS[finding.level], finding.subject, text)
    return table


def demo_ready(findings: Iterable[Finding]) -> bool:
    """Whether nothing fails that `make demo` needs."""
    return not any(finding.level == "fail" and finding.demo for finding in findings)


def verdict(findings: Sequence[Finding]) -> str:
    """One closing line."""
    failing = [finding.subject for finding in findings if finding.level == "fail"]
    blocking = [finding.subject for finding in findings if finding.level == "fail" and finding.demo]
    if blocking:
        return f"[red]`make demo` will not work here[/]: {', '.join(blocking)}"
    if failing:
        return f"[yellow]`make demo` works here, but not all that is configured[/]: {', '.join(failing)}"
    warned = [finding.subject for finding in findings if finding.level == "warn"]
    return "[green]`make demo` works here[/]" + (f"; worth a look: {', '.join(warned)}" if warned else "")


def write_result(path: Path, findings: Sequence[Finding]) -> None:
    """Write the findings as JSON, whole or not at all."""
    result = {
        "demo_ready": demo_ready(findings),
        "findings": [asdict(finding) for finding in findings],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps(result, indent=2) + "\n")
    beside.replace(path)


def run() -> None:
    """Like every job through `launch`; where that cannot be imported, without the config."""
    try:
        from pipelines.job import launch
    except Exception as error:
        defaults = Machine(Path("outputs"), "outputs", None, None, Path(".cache/models"), start_ray=False, import_vllm=False)
        sys.exit(examine(defaults, error))
    launch(main)


if __name__ == "__main__":
    run()
