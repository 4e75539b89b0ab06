"""What serving each drafter of a sweep costs: drafting timed on this machine, verification timed as well or read from a cost table."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from actors.drafter import build_drafter, load_target_head
from decoding.latency import draft_cost, verify_cost
from decoding.prediction import ServingCost
from decoding.target import TransformersTarget
from decoding.throughput import ThroughputTable
from drafters.config import DrafterConfig
from pipelines.evaluation_report import machine
from pipelines.job import JobError
from pipelines.machine_checks import usable_cores
from pipelines.profile import read_table
from pipelines.sweep_config import Serving


class Costs:
    """Measures each architecture once; weights do not matter to time, so they are random.

    Args:
        model: folder of the target.
        known: what an earlier start measured, by `key`.
        tell: gets a line where table and machine do not go together.
    """

    def __init__(self, serving: Serving, model: str, known: dict[str, ServingCost], tell: Callable[[str], None]) -> None:
        self.serving, self.model, self.known, self._tell = serving, model, known, tell
        self.table: ThroughputTable | None = None if serving.table is None else read_table(serving.table)
        self._loaded: Any = None
        self._head: Any = None
        self._verify: dict[int, float] = {}
        measured_on = None if self.table is None else self.table.fingerprint.get("machine")
        if measured_on not in (None, machine()):
            tell(f"{serving.table} was measured on {measured_on}, drafts are timed here ({machine()}): predictions mix the two")

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        here = f"{machine()}, {self.threads} threads, {self.serving.dtype}"
        verification = "timed" if self.table is None else f"verification from {self.serving.table}, drafting timed"
        return f"{self.serving.requests} requests of {self.serving.context} tokens; {verification} on {here}"

    @property
    def threads(self) -> int:
        return self.serving.threads or usable_cores()

    def key(self, config: DrafterConfig) -> str:
        """Changes with all that the time may depend on."""
        facts = [config.to_dict(), self.serving.model_dump(mode="json"), machine()]
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()

    def of(self, config: DrafterConfig, layer_ids: Sequence[int]) -> ServingCost:
        """What a round of a drafter of this architecture, which reads those layers, takes."""
        key = self.key(config)
        if key not in self.known:
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            try:
                self.known[key] = self._measure(config, layer_ids)
            finally:
                torch.set_num_threads(before)
        return self.known[key]

    def release(self) -> None:
        """Give the target's memory back; it is loaded again where another architecture comes."""
        self._loaded = self._head = None

    def _measure(self, config: DrafterConfig, layer_ids: Sequence[int]) -> ServingCost:
        serving = self.serving
        if self._loaded is None:
            from transformers import AutoModelForCausalLM
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
            self._tell("timing what rounds of these drafters cost on this machine")
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            loaded: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=getattr(torch, serving.dtype))
            self._loaded = loaded.to(device).eval()
            self._head = load_target_head(self.model, serving.dtype).to(device)
        target = TransformersTarget.for_drafter(self._loaded, layer_ids, config)
        if serving.context + config.block_length + 1 > target.max_positions:
            raise JobError(f"sweep.serving.context={serving.context} and a block of {config.block_length} exceed the target's positions")
        drafter = build_drafter(self.model, config, serving.dtype, self._head).to(target.device).eval()
        _, draft = draft_cost(target, drafter, serving.requests, serving.context, serving.repeats)
        return ServingCost(serving.requests, config.block_length, draft, self._pass(target, config.block_length), self._pass(target, 0))

    def _pass(self, target: TransformersTarget, width: int) -> float:
        if self.table is not None:
            return self.table.verify_seconds(self.serving.requests, width) if width else self.table.plain_seconds(self.serving.requests)
        if width not in self._verify:
            self._verify[width] = verify_cost(target, width, self.serving.requests, self.serving.context, self.serving.repeats)
        return self._verify[width]
