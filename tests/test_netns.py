"""Two network namespaces joined by a pair of virtual interfaces: nothing at a loopback address is reachable across.

Left out where this user may not make them (see ``conftest``). The other side has a host name of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.model import FakeModel
from tests.fakes.rows import RowTrainer
from tests.test_session import assert_serves, engine
from weightsync.config import load_config
from weightsync.reports import PushRequest
from weightsync.session import Session

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]
HERE, THERE, NAME = "10.213.7.1", "10.213.7.2", "node-b"
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Other:
    """The process on the other side, and its addresses."""

    process: subprocess.Popen
    publisher: str
    node: str

    def train(self, step: int) -> None:
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "trained"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[Other]:
    space, mine, theirs = f"ws{os.getpid()}", f"wsa{os.getpid()}", f"wsb{os.getpid()}"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)

    ip("netns", "add", space)
    try:
        ip("link", "add", mine, "type", "veth", "peer", "name", theirs, "netns", space)
        ip("addr", "add", f"{HERE}/30", "dev", mine)
        ip("link", "set", mine, "up")
        for arguments in (("addr", "add", f"{THERE}/30", "dev", theirs), ("link", "set", theirs, "up")):
            ip("-n", space, *arguments)
        ip("-n", space, "link", "set", "lo", "up")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", mine)
        inside = f"hostname {NAME}; exec {sys.executable} -m tests.netns_rank {THERE} {NAME}"
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", inside],
            cwd=ROOT,
            env=os.environ | {"GLOO_SOCKET_IFNAME": theirs},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Other(process, **json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(timeout=30)
            process.stdout.close()
    finally:
        ip("netns", "del", space)


@pytest.fixture
def pushed(other: Other) -> Iterator[Callable[..., list[str]]]:
    """Two pushes from both sides into engines; the notes of the plan."""
    trainer = RowTrainer(FakeModel().shapes, ["node-a", NAME], replicated=["norm.weight"], bind=HERE, ranks=[0])

    def push(*engines: FakeEngine, **config) -> list[str]:
        settings = {
            "pair": "sgl_dtensor_v2",
            "bind_host": HERE,
            "bucket_bytes": 256,
            "timeout_s": 60.0,
            "connect_timeout_s": 60.0,
            "engines": [{"url": one.url} for one in engines],
            "publishers": [*trainer.addresses, other.publisher],
        }
        session = Session(load_config(settings | config), trainer="dtensor_v2")
        try:
            for step in (1, 2):
                trainer.train(step)
                other.train(step)
                session.push(PushRequest(step=step))
                for one in engines:
                    assert_serves(one, trainer.tensors, step)
            return session.plan().notes
        finally:
            session.close()
            for one in engines:
                one.close()

    yield push
    trainer.close()


def test_node_actor_and_actor_send_from_both_sides(pushed, other) -> None:
    stock = [engine(2, receiver=False), engine(1, receiver=False)]
    pushed(*stock, route="nccl", verify="none", node_actors=[{"address": other.node}])


def test_slices_from_both_sides_are_verified(pushed, other) -> None:
    pushed(engine(2), route="nccl", node_actors=[{"address": other.node}])


def test_shards_arrive_from_the_other_side(pushed) -> None:
    notes = pushed(engine(2), source="nccl")
    assert any("arrive over a group of their own" in note for note in notes)
