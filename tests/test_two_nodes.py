"""Two nodes on one machine: two raylets, the actor placed by resource or label, an environment built on each of them.

The second raylet sees a checkout of its own, with environments of its own; its training ranks say they are on another
host. Engines are fakes that really load; everything else is as on two machines, over gloo.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray._private import state
from ray.cluster_utils import Cluster

import weightsync
from tests.fakes.engine import FakeEngine
from tests.fakes.model import FakeModel
from tests.fakes.rows import RowTrainer
from tests.test_session import assert_serves, engine
from weightsync import builds
from weightsync.envs import project_root
from weightsync.errors import EnvError, TransferTimeout
from weightsync.versions import library_versions

pytestmark = pytest.mark.timeout(600)
SHAPES = FakeModel().shapes
PAIR = "sgl_dtensor_v2"
ROOT = project_root()


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the second node has: this checkout's package and the pair's project, not built yet.

    It is beside this checkout's caches, so that uv can link from them.
    """
    root = tmp_path_factory.mktemp("node-b")
    shutil.copytree(ROOT / "weightsync", root / "weightsync", ignore=shutil.ignore_patterns("__pycache__"))
    project = root / "envs" / PAIR
    project.mkdir(parents=True)
    for name in ("pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / "envs" / PAIR / name, project / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root / name)
    (root / ".tools").mkdir()
    (root / ".tools" / "uv").symlink_to((ROOT / ".tools" / "uv").resolve())
    return root


@pytest.fixture(scope="module")
def cluster(second: Path) -> Iterator[Cluster]:
    """Two raylets: ``a``, where the driver is, and ``b``."""
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"a": 1.0}, "labels": {"part": "trainers"}},
    )
    made.add_node(num_cpus=1, resources={"b": 1.0}, labels={"part": "others"}, env_vars={"PYTHONPATH": str(second)})
    with contextlib.chdir(second.parent):  # Ray puts the driver's folder before all that its workers import from
        ray.init(address=made.address, log_to_driver=False, logging_level="warning")
    yield made
    ray.shutdown()
    made.shutdown()


class Run:
    """Two training ranks, one a node, and engines."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.trainer = RowTrainer(SHAPES, ["node-a", "node-b"], replicated=["norm.weight"])
        self.engines = list(engines)

    def settings(self, **config) -> dict:
        return {"pair": PAIR, "bucket_bytes": 256, "timeout_s": 60.0, "connect_timeout_s": 90.0} | config

    def launch(self, **config) -> weightsync.WeightSync:
        urls = [one.url for one in self.engines]
        return weightsync.launch(self.settings(**config), publishers=self.trainer.addresses, engines=urls)

    def close(self) -> None:
        self.trainer.close()
        for one in self.engines:
            one.close()


@pytest.fixture
def run(cluster: Cluster) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*engines: FakeEngine) -> Run:
        made.append(Run(*engines))
        return made[-1]

    yield make
    for one in made:
        one.close()


def actors() -> dict[str, list[str]]:
    """By class, on which of the nodes its living actors are."""
    names = {node["NodeID"]: "a" if "a" in node["Resources"] else "b" for node in ray.nodes()}
    found: dict[str, list[str]] = {}
    for actor in state.actors().values():
        if actor["State"] == "ALIVE":
            found.setdefault(actor["ActorClassName"], []).append(names[actor["Address"]["NodeID"]])
    return found


def soon_no_actors() -> bool:
    """Killing an actor is not waited for."""
    give_up = time.monotonic() + 20
    while actors() and time.monotonic() < give_up:
        time.sleep(0.1)
    return not actors()


def test_the_actor_here_and_a_node_actor_there_push_from_both_nodes(run, second):
    one = run(engine(2, receiver=False), engine(1, receiver=False))
    there = [{"host": "node-b", "resources": {"b": 0.1}}]
    with one.launch(route="nccl", verify="none", placement={"resources": {"a": 0.1}}, node_actors=there) as sync:
        assert actors() == {"SglDTensorV2WeightSync": ["a"], "NodeActor": ["b"]}
        for step in (1, 2):
            one.trainer.train(step)
            report = sync.push(step)
            assert report.route == "nccl"
            for fake in one.engines:
                assert_serves(fake, one.trainer.tensors, step)
    own = second / "envs" / PAIR
    assert builds.is_whole(own), "the second node built its own environment"
    marker = json.loads((own / ".venv" / builds.MARKER).read_text())
    assert marker["path"] == str((own / ".venv").resolve())
    assert soon_no_actors()


def test_an_actor_placed_by_label_on_a_node_without_training_ranks_receives_their_shards(run):
    one = run(engine(2))
    with one.launch(route="shm", source="nccl", placement={"labels": {"part": "others"}}) as sync:
        assert actors() == {"SglDTensorV2WeightSync": ["b"]}
        one.trainer.train(1)
        assert sync.push(1).verified
        assert_serves(one.engines[0], one.trainer.tensors, 1)


def test_a_node_that_is_not_there_is_waited_for_until_the_deadline_and_named(run, monkeypatch):
    monkeypatch.setattr("weightsync.envs.BUILD_TIMEOUT_S", 0.0)
    one = run(engine(1))
    with pytest.raises(
        TransferTimeout, match=r"environment sgl_dtensor_v2 on a node with resources \{'nowhere': 0\.1\}"
    ):
        one.launch(placement={"resources": {"nowhere": 0.1}}, connect_timeout_s=3.0)
    assert soon_no_actors()


def test_an_interpreter_that_is_missing_on_the_other_node_is_refused_from_there(run):
    one = run(engine(1))
    missing = {PAIR: {"python": "/nowhere/python"}}
    with pytest.raises(EnvError, match=r"/nowhere/python cannot be run"):
        one.launch(placement={"resources": {"b": 0.1}}, envs=missing)


def test_each_node_has_a_checkout_of_its_own_and_the_drivers_python(cluster, second):
    found = ray.get(ray.remote(library_versions).options(resources={"b": 0.1}, num_cpus=0).remote(), timeout=60)
    assert found["python"] == platform.python_version() and found["weightsync"] == str(second / "weightsync")
