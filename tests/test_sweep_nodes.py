"""Sweeps on a Ray cluster of several nodes: they die with all that runs on them, and trials share their GPUs."""

import contextlib
import time
from collections.abc import Iterator

import psutil
import pytest
from pipeline_runs import ENVIRONMENT, contents, start
from sweep_runs import NAMES, SweepShop, finished, make_sweep_shop, trial_processes, wait_until

from actors.trial_record import TrialRecord
from pipelines.sweep_trials import Book

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 1200
LONG = [f"train.steps={STEPS}", "train.checkpoint_every=20", "train.score_every=100", "train.log_every=5"]
PLAIN = ["sweep.serving=null", "tracking=none"]


class Nodes:
    """A Ray cluster on this machine, whose head has no resources."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.raylets: list[psutil.Process] = []

    def add(self, **resources: int) -> None:
        node = self.cluster.add_node(**resources)
        self.raylets.append(psutil.Process(node.all_processes["raylet"][0].process.pid))

    def kill_one_at_work(self) -> None:
        """All processes of a node on which a trial runs, at once."""
        raylet = next(raylet for raylet in self.raylets if trial_processes(raylet.pid))
        self.raylets.remove(raylet)
        family = [raylet, *raylet.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=20)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> SweepShop:
    return make_sweep_shop(tmp_path_factory.mktemp("shop"))


CLOCKED = ("_per_second", "_seconds", "_share", "_bytes")


def figures(record: TrialRecord) -> list[dict[str, float]]:
    """All rows, without what depends on the clock and on restarts."""
    return [{name: value for name, value in row.items() if not name.endswith(CLOCKED)} for row in record.rows]


def test_a_sweep_goes_on_when_nodes_die_and_finds_the_same(shop: SweepShop, nodes: Nodes) -> None:
    whole = finished(start("sweep", shop.sweep("whole", *LONG, *PLAIN, "cluster.cpus=2")))
    for _ in range(2):
        nodes.add(num_cpus=1)
    process = start("sweep", shop.sweep("hit", *LONG, *PLAIN, f"cluster.address={nodes.cluster.address}"))

    def at_work(first: int, last: int) -> list[str]:
        """Trials whose newest checkpoint is of such a step."""
        return [trial for trial in NAMES if first <= shop.step("hit", trial) <= last]

    def killed() -> dict[str, tuple[int, TrialRecord]]:
        """What every trial has kept of itself once a node is gone with its trial."""
        nodes.kill_one_at_work()
        return {trial: (shop.step("hit", trial), shop.record("hit", trial)) for trial in NAMES}

    # One of two nodes: its trial has to wait for the other.
    wait_until(lambda: any(shop.record("hit", trial).finished for trial in NAMES) and len(at_work(40, 2 * STEPS // 3)) == 2, process)
    first = killed()
    done = {trial: contents(shop.run_of("hit", trial)) for trial, (_, record) in first.items() if record.finished}
    wait_until(lambda: any(shop.record("hit", trial).starts == 2 for trial in NAMES), process)
    hit = next(trial for trial in NAMES if shop.record("hit", trial).starts == 2)
    # The other one too, while the trial goes on there: now there is none until another one comes.
    wait_until(lambda: first[hit][0] + 40 <= shop.step("hit", hit), process)
    second = killed()
    nodes.add(num_cpus=1)
    result = finished(process)

    assert second[hit][0] < STEPS, "killed at work"
    for step, record in (first[hit], second[hit]):
        kept = [row for row in record.rows if row["step"] <= step]
        assert kept == shop.record("hit", hit).rows[: len(kept)], "speeds and all: no step before the checkpoint is taken again"
    assert {row["trial"]: row["starts"] for row in result["trials"]} == {trial: 3 if trial == hit else 1 for trial in NAMES}
    assert {row["trial"]: len(row["failures"]) for row in result["trials"]} == {trial: 2 if trial == hit else 0 for trial in NAMES}
    assert all("its process ended" in told for row in result["trials"] for told in row["failures"])
    for trial, before in done.items():
        assert contents(shop.run_of("hit", trial)) == before, "what was finished is not touched"
    for trial in NAMES:
        assert shop.weights("hit", trial) == shop.weights("whole", trial), trial
        assert figures(shop.record("hit", trial)) == figures(shop.record("whole", trial)), trial
    assert result["best"] == whole["best"]


def test_two_trials_share_a_gpu_by_halves(shop: SweepShop, nodes: Nodes) -> None:
    """Ray is told of a GPU that is not there: trials are placed by it and train on the CPU."""
    nodes.add(num_cpus=4, num_gpus=1)
    halves = ["workers.gpus=0.5", "sweep.space.drafter.head_rank=[8]", "sweep.space.drafter.block_length=[2,3,4]"]
    process = start("sweep", shop.sweep("halves", *LONG, *PLAIN, *halves, f"cluster.address={nodes.cluster.address}"))
    together = set()
    while process.poll() is None:
        together.add(sum(trial.outcome == "running" for trial in Book.open(shop.folder_of("halves"))))
        time.sleep(0.05)
    result = finished(process)
    assert [row["outcome"] for row in result["trials"]] == ["finished"] * 3
    assert max(together) == 2
