"""The receiver inside real servers: attached through SGLang's own call, pulling from shared memory, read back."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch

from tests.servers import BOOT_SEED, PADDED_TIED, Kind, Servers, ask
from weightsync import receiver_wire as wire
from weightsync.boxes import dense_strides, whole
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.demo_model import weights
from weightsync.engines.sglang import SglangEngine
from weightsync.fingerprint import fingerprint
from weightsync.inbox import Doorbell, Inbox
from weightsync.rpc import Client, Server
from weightsync.spec import Copy, Layout, RankPlan, Shard, TensorSpec, View
from weightsync.transports import shm
from weightsync.views import box_of

KINDS = [PADDED_TIED, Kind("0.5.12")]
PROMPT = "The quick brown fox jumps over"
OTHER_SEED = 2

pytestmark = pytest.mark.timeout(900)


def soon() -> Deadline:
    return Deadline(60.0, "test")


class Rig:
    """An engine, the receivers of its ranks, and a trainer whose every tensor lies whole in one arena."""

    def __init__(self, url: str, kind: Kind) -> None:
        self.kind, self.url, self.session = kind, url, secrets.token_hex(4)
        self.engine = SglangEngine(url, config=Config(pair="sgl_dtensor_v2"))
        self.info = self.engine.connect(soon())
        self.inbox = Inbox()
        self.server = Server(Doorbell(self.inbox, lambda timeout_s: None, lambda marked: None))
        self.values = {n: torch.from_numpy(v) for n, v in weights(kind.model, seed=BOOT_SEED).items()}
        self.shards, size = [], 0
        for name, value in self.values.items():
            shape = tuple(value.shape)
            self.shards.append(Shard(name, shape, "float32", whole(shape), dense_strides(shape), 0, size))
            size += -(-value.nbytes // 256) * 256
        self.arena = shm.allocate(size)
        self.clients = self.attach()
        self.layouts = [c.call("needs", deadline=soon(), returns=Layout) for c in self.clients]

    def send(self, commands: list[wire.Attach] | list[wire.Pull]) -> None:
        self.engine.begin(soon())
        self.engine.update([wire.payload(c) for c in commands], wire.LOADER, soon())
        self.engine.end(soon())

    def attach(self) -> list[Client]:
        specs = [TensorSpec(s.tensor, s.shape, s.dtype) for s in self.shards]
        ranks = range(self.kind.tp_size)
        self.send(
            [wire.Attach(reply=self.server.address, session=self.session, tp_rank=r, tensors=specs) for r in ranks]
        )
        announced = self.inbox.wait(self.session, self.kind.tp_size, soon())
        assert len({a.pid for a in announced}) == self.kind.tp_size and not any(a.error for a in announced)
        return [Client(a.address) for a in announced]

    def publish(self, seed: int) -> None:
        self.values = {n: torch.from_numpy(v) for n, v in weights(self.kind.model, seed=seed).items()}
        for shard in self.shards:
            value = self.values[shard.tensor].contiguous().view(-1).view(torch.uint8)
            self.arena.tensor[shard.byte_offset : shard.byte_offset + value.numel()].copy_(value)

    def install(self) -> None:
        index = {s.tensor: i for i, s in enumerate(self.shards)}
        for client, layout in zip(self.clients, self.layouts):
            copies = [Copy(n.tensor, n.box, 0, self.source(index[n.tensor], n), n.view) for n in layout.needs]
            plan = RankPlan(self.url, layout.rank, copies, layout.needs, layout.fills)
            install = wire.Install("plan", {0: [self.arena.segment]}, {0: self.shards}, plan)
            client.call("install", install, deadline=soon())

    def source(self, index: int, need) -> View:
        strides = self.shards[index].strides
        return View(index, sum(o * s for o, s in zip(need.box.offset, strides)), strides)

    def pull(self, push_id: str) -> list[wire.PullResult]:
        self.send([wire.Pull(self.session, push_id, "plan", step=1, full=True) for _ in self.clients])
        self.engine.flush(soon())
        request = wire.ResultRequest(push_id=push_id)
        return [c.call("result", request, deadline=soon(), returns=wire.PullResult) for c in self.clients]

    def close(self) -> None:
        for client in self.clients:
            client.call("detach", deadline=soon())
            client.close()
        self.engine.close()
        self.server.close()
        self.arena.close()


@pytest.fixture(params=KINDS, ids=str)
def rig(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Rig]:
    rig = Rig(servers.get(request.param).url, request.param)
    yield rig
    rig.close()


def test_poisoned_engine_is_healed_by_a_pull(rig):
    rig.install()
    assert all(layout.opaque == {} and layout.ignored == [] for layout in rig.layouts)
    said = {}
    for seed in (BOOT_SEED, OTHER_SEED, BOOT_SEED):
        rig.engine.pause("abort", soon())
        for client in rig.clients:
            client.call("poison", deadline=soon())
        rig.publish(seed)
        results = rig.pull(secrets.token_hex(4))
        assert all(r.ok and r.applied for r in results), results
        for client, layout in zip(rig.clients, rig.layouts):
            expected = [fingerprint(box_of(rig.values[n.tensor], n.box), n.box.offset) for n in layout.needs]
            assert client.call("verify", deadline=soon(), returns=list[int]) == expected
        rig.engine.resume(soon())
        said.setdefault(seed, []).append(ask(rig.url, PROMPT).tokens)
    assert said[BOOT_SEED][0] == said[BOOT_SEED][1] != said[OTHER_SEED][0]
    boots = {c.call("status", deadline=soon(), returns=wire.Status).boot_id for c in rig.clients}
    assert len(boots) == rig.kind.tp_size
