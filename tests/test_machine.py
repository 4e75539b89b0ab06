"""How many engines a machine gets, and how many GPUs each; what trainer workers find on a cluster."""

import pytest
import torch

from actors.cluster import ClusterSettings
from pipelines import machine
from pipelines.machine import decoder_count, engine_count, room


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        (8, (None, None, 1, 1), (8, 1.0)),
        (8, (None, None, 1, 4), (2, 4.0)),
        (2, (None, None, 1, 4), (1, 4.0)),  # Ray then says what it waits for
        (8, (3, None, 1, 2), (3, 2.0)),
        (8, (None, 0.5, 1, 1), (16, 0.5)),
        (0, (None, None, 2, 1), (3, 0.0)),
        (0, (5, None, 2, 1), (5, 0.0)),
    ],
)
def test_engines_share_the_gpus_by_the_size_of_the_model(
    monkeypatch: pytest.MonkeyPatch, there: int, asked: tuple[int | None, float | None, int, int], expected: tuple[int, float]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    assert engine_count(ClusterSettings(), *asked) == expected


@pytest.mark.slow
def test_a_clusters_gpus_count_and_not_the_drivers() -> None:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for gpus in (2, 1):
            nodes.add_node(num_cpus=1, num_gpus=gpus)
        there = ClusterSettings(address=nodes.address)
        assert room(there) == (2, 3)
        assert engine_count(there, None, None, 1) == (3, 1.0)
        assert decoder_count(there, None, None, None) == (3, 1, 1.0)
    finally:
        nodes.shutdown()
    assert room(ClusterSettings())[1] == torch.cuda.device_count()
