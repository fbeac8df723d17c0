"""Costs on made-up clusters, against what one works out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.errors import ConfigError
from weightsync.topology import (
    SIZES,
    WAYS,
    Case,
    Cluster,
    Flow,
    Model,
    Topology,
    _flows,
    cost,
    explain,
    load_topology,
    split,
)

CLUSTER = Cluster(gpus_per_node=8, nvlink_gb_s=400, nics_per_node=8, nic_gb_s=50)


def case(trainers: int, engines: int, *, tp: int = 1, num_bytes: int = 1_000_000_000, replicas: int = 1, share=0.0):
    return Case(Model("m", num_bytes, tp, share), trainers, engines, replicas)


def arriving(flows: list[Flow], gpu: int) -> float:
    return sum(f.num_bytes for f in flows if f.target == gpu)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("trainers", [1, 3, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_every_engine_rank_gets_its_slices_once_and_all_of_what_is_replicated(tp, trainers, share):
    one = case(trainers, 16, tp=tp, share=share)
    flows = list(_flows(one, "slices"))
    for number in range(16):
        wanted = 1e9 * ((1 - share) / tp + share)
        assert arriving(flows, trainers + number) == pytest.approx(wanted)
    sent = [sum(f.num_bytes for f in flows if f.source == gpu) for gpu in range(trainers)]
    assert sent == pytest.approx([sum(sent) / trainers] * trainers), "every GPU of the trainer sends as much"


def test_replicas_share_the_engines():
    flows = list(_flows(case(4, 4, replicas=2), "slices"))
    assert {f.source for f in flows if f.target == 4} == {0, 1}
    assert {f.source for f in flows if f.target == 5} == {2, 3}


def test_inside_a_node_only_nvlink_is_used():
    found = cost(CLUSTER, case(4, 4), "slices")
    assert all(link.startswith("NVLink") for link, _ in found.links)
    assert found.num_bytes == pytest.approx(1e9) and found.seconds == pytest.approx(1e9 / 400e9)


def test_between_nodes_the_nics_decide():
    found = cost(CLUSTER, case(8, 8, tp=8), "slices")
    assert found.busiest.startswith("NIC") and found.num_bytes == pytest.approx(1e9 / 8)
    assert found.seconds == pytest.approx(1e9 / 8 / 50e9)


def test_a_broadcast_to_each_engine_leaves_one_gpu_as_often_as_there_are_engines():
    found = cost(CLUSTER, case(8, 16, tp=8), "broadcast")
    assert dict(found.links)["NIC out of node 0 NIC 0"] == pytest.approx(2e9)


def test_a_full_gather_brings_everything_everywhere_first():
    flows = list(_flows(case(4, 2), "full gather"))
    for gpu in range(4):
        assert arriving(flows, gpu) == pytest.approx(0.75e9)
    assert [arriving(flows, gpu) for gpu in (4, 5)] == [1e9, 1e9]
    found = cost(CLUSTER, case(16, 16, tp=8), "full gather")
    assert dict(found.links)["NIC out of node 0 NIC 0"] == pytest.approx(1e9 + 1e9 * 15 / 16 / 8)


def test_rings_use_all_nics_of_a_node():
    found = dict(cost(CLUSTER, case(16, 16, tp=16), "full gather").links)
    assert [found[f"NIC into node 3 NIC {nic}"] for nic in range(8)] == pytest.approx([1e9 / 8] * 8)


def test_a_node_with_fewer_nics_than_gpus_shares_them():
    found = cost(Cluster(nics_per_node=2, nic_gb_s=50), case(8, 8), "slices")
    assert found.num_bytes == pytest.approx(4e9), "four engine GPUs behind one NIC"


def test_slices_never_take_longer_than_a_full_gather():
    topology = Topology()
    for model in topology.models:
        for gpus in SIZES[:5]:
            one = split(topology, model, gpus)
            if not isinstance(one, str):
                slices, _, gather = (cost(topology.cluster, one, way).seconds for way in WAYS)
                assert slices <= gather


def test_what_does_not_run_is_said():
    topology = Topology()
    assert split(topology, topology.models[2], 16) == "an engine needs 16 GPUs, 8 are left"
    assert "does not fit" in str(split(topology, Model("m", 10**12, 1), 8))
    assert split(Topology(replicas=3), Model("m", 10**9, 1), 16) == "8 trainer GPUs are not 3 replicas"


def test_the_report_has_a_row_for_every_size_and_way():
    text = explain(Topology(gpus=(8, 16, 1024)))
    lines = text.splitlines()[2:]
    assert len([line for line in lines if line.split()[0] == "8B"]) == 9
    assert len([line for line in lines if " slices " in line]) == 3 + 2 + 1
    assert "NIC out of node 0 NIC 0" in text and "an engine needs 8 GPUs, 4 are left" in text


def test_the_example_file_is_the_default():
    assert load_topology(Path(__file__).parent.parent / "configs" / "topology.yaml") == Topology()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: {nic_gb_s: 0}", "cluster.nic_gb_s must be positive, got 0"),
        ("cluster: {nics: 3}", "unknown field `nics`"),
        ("trainer_share: 1", "trainer_share must be between 0 and 1, got 1"),
        ("gpus: [8, -1]", r"gpus\[1\] must be positive, got -1"),
        ("models: [{name: x, num_bytes: 10, tp: 0}]", "models.x.tp must be positive, got 0"),
        ("a: [", "while parsing"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, text, said):
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_topology(path)
    with pytest.raises(ConfigError, match="nowhere"):
        load_topology(tmp_path / "nowhere.yaml")
