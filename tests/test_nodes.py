"""Trainers on several nodes, over gloo: node actors start senders there, and buckets are gathered from everywhere.

The other nodes are this machine under another name; their node actors are servers with nurseries of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.fakes.engine import FakeEngine
from tests.fakes.rows import RowTrainer
from tests.row_world import SHAPES, RowWorld
from tests.senders import Shared, stock
from tests.test_session import engine
from weightsync import exchanging, groups_broadcast, nodes, routes_nccl
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, TransferError
from weightsync.routes_nccl import check_fits
from weightsync.sharing import link_bytes
from weightsync.transports import nccl
from weightsync.transports import node as node_module
from weightsync.transports.exchange import Buffers
from weightsync.transports.node import NodeServer, RemoteNursery

pytestmark = pytest.mark.timeout(180)
HERE, B, C = "node-a", "node-b", "node-c"


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, NodeServer]]:
    """A node actor for each host but the first."""
    made = {host: NodeServer(host_name=host) for host in (B, C)}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture
def cluster(actors, nursery, monkeypatch) -> Iterator[Callable[..., RowWorld]]:
    made: list[RowWorld] = []

    monkeypatch.setattr(routes_nccl, "Nursery", lambda: Shared(nursery))

    def make(hosts: list[str], *engines: FakeEngine, met: list[str] | None = None, **config) -> RowWorld:
        addresses = [actors[host].address for host in (B, C) if host in hosts] if met is None else met
        settings = {"route": "nccl", "node_actors": [{"address": address} for address in addresses]} | config
        made.append(RowWorld(list(engines), hosts, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Buffers]:
    """All that is packed or unpacked in, of this process."""
    kept: list[Buffers] = []

    class Kept(Buffers):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            kept.append(self)

    monkeypatch.setattr(exchanging, "Buffers", Kept)
    monkeypatch.setattr(nccl, "Buffers", Kept)
    return kept


def senders_of(actor: NodeServer) -> list:
    return [sender for senders in actor._wire._senders.values() for sender in senders]


def test_a_sender_that_fills_is_told_nothing_of_replicas_on_other_nodes(cluster):
    one = cluster([HERE, B], stock(), replicated=list(SHAPES))
    one.push(1)
    one.assert_all_serve(1)
    broadcast = one.session._groundwork.routes["nccl"]._whole
    (group,) = broadcast._groups.values()
    assert broadcast._gather is None and group.fills and set(group._fill.segments) == {0}


def test_stock_engines_get_buckets_gathered_from_three_nodes(cluster, actors):
    one = cluster([HERE, B, B, C], stock(), stock(2))
    for step in (1, 2):
        report = one.push(step)
        assert report.route == "nccl"
        one.assert_all_serve(step)
    assert [len(senders_of(actors[host])) for host in (B, C)] == [1, 1], "one for all of a node's host memory"
    one.close()
    assert not senders_of(actors[B]) and not senders_of(actors[C])


def test_receivers_get_slices_from_three_nodes_and_are_verified(cluster):
    one = cluster([HERE, B, C], engine(1), engine(2))
    for step in (1, 2):
        assert one.push(step).verified
        one.assert_all_serve(step)


def norms(cluster, *tp_sizes: int) -> RowWorld:
    """Engines of those sizes that hold a replicated tensor alone, of 12 kB, in buckets of 4; pushed to once."""
    one = cluster([HERE, B], *[engine(tp_size) for tp_size in tp_sizes])
    for fake, tp in zip(one.engines, tp_sizes, strict=True):
        fake.models[:] = [Norm(rank, tp) for rank in range(tp)]
    one.trainer.close()
    one.trainer = RowTrainer({"norm.weight": (3000,)}, [HERE, B])
    one._settings |= {"publishers": one.trainer.addresses, "bucket_bytes": 4096}
    assert one.push(1).verified
    held = [model.norm for fake in one.engines for model in fake.models]
    assert all(torch.equal(norm, one.trainer.tensors["norm.weight"]) for norm in held)
    return one


def test_what_tp_ranks_need_alike_leaves_the_trainer_once(cluster):
    one = norms(cluster, 2, 1)
    groups = one.session._groundwork.routes["nccl"]._exchanges
    sent = [groups[fake.url].sent_bytes for fake in one.engines]
    assert sent == [12_000, 12_000], "as much for two ranks as for one"
    links = link_bytes(groups[one.engines[0].url].shared, lambda c: 4 * c.box.size[0])
    assert sum(n for (a, _), n in links.items() if str(a).startswith("trainer")) == 12_000
    assert sum(n for (a, b), n in links.items() if a in (0, 1) and b in (0, 1)) == 12_000
    assert one.session.status().engines[0].num_bytes == 24_000, "and both hold it"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_no_end_packs_or_unpacks_in_more_than_two_buckets_passes_included(cluster, made, tp_size):
    one = norms(cluster, tp_size)
    of_ranks = [sending.nbytes + receiving.nbytes for sending, receiving in zip(made[::2], made[1::2], strict=True)]
    assert len(of_ranks) == tp_size
    made.clear()
    (group,) = one.session._groundwork.routes["nccl"]._exchanges.values()
    for load in group._loads:  # as their senders do, in processes of their own
        nccl.outgoing(load, lambda copy: torch.zeros(copy.box.size), torch.device("cpu"))
    assert len(made) == 2
    taken = [*of_ranks, *(buffers.nbytes for buffers in made)]
    assert 4096 < max(taken) <= 2 * 4096, taken


def test_buckets_gathered_from_other_nodes_take_two_with_what_they_pass_on_the_way(cluster, made):
    one = cluster([HERE, B, C], stock())
    one.trainer.close()
    one.trainer = RowTrainer({f"{number}.weight": (682, 3) for number in range(5)}, [HERE, B, C])
    bucket_bytes = 9 << 10  # of which 8 are tensors
    one._settings |= {"publishers": one.trainer.addresses, "bucket_bytes": bucket_bytes}
    one.engines[0].models[0].load_weights = lambda weights: [tensor for _, tensor in weights]
    one.push(1)
    broadcast = one.session._groundwork.routes["nccl"]._whole
    nccl.incoming(broadcast._gather._expect, broadcast._memory, torch.device("cpu"))
    (buffers,) = made
    assert buffers.nbytes > 0 and len(broadcast._buckets) == 5
    assert broadcast._memory.segment.nbytes + buffers.nbytes <= 2 * bucket_bytes


class Norm(torch.nn.Module):
    """A replicated tensor alone, large beside its packing."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.full((3000,), -1.0), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if name == "norm.weight":
                self.norm.data.copy_(weight)


@pytest.mark.parametrize("kind", [stock, engine])
def test_a_sender_on_another_node_that_was_killed_is_replaced(cluster, actors, kind):
    one = cluster([HERE, B], kind(2))
    one.push(1)
    before = senders_of(actors[B])
    for sender in before:
        os.kill(sender.pid, signal.SIGKILL)
    while any(sender.alive for sender in before):
        time.sleep(0.01)
    one.push(2)
    one.assert_all_serve(2)


def test_a_sender_that_stalls_on_another_node_ends_by_the_deadline_and_the_next_push_heals(
    cluster, actors, monkeypatch
):
    monkeypatch.setattr(groups_broadcast, "MIN_STALL_S", 2.0)
    one = cluster([HERE, B], stock(2), timeout_s=12.0)
    one.push(1)
    for sender in senders_of(actors[B]):
        os.kill(sender.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"gathering bucket \d+ of \d+ from other nodes"):
        one.push(2)
    assert time.monotonic() - started < 12
    report = one.push(3, timeout_s=60.0)
    assert [e.state for e in report.engines] == ["serving"]
    one.assert_all_serve(3)


def test_an_actor_that_is_gone_takes_its_senders_along_after_a_while(actors, monkeypatch):
    monkeypatch.setattr(node_module, "LEASE_S", 1.2)
    actor = NodeServer(host_name="node-d")
    nursery = RemoteNursery(actor.address, Deadline(30.0, "test"))
    sender = nursery.start("", {}, Deadline(30.0, "test"))
    assert sender.alive
    nursery._closed.set()  # no word from it any more
    for _ in range(100):
        if not sender.alive:
            break
        time.sleep(0.1)
    assert not sender.alive and not senders_of(actor)
    actor.close()


# ------------------------------------------------------------------------------------------------- what is refused


def test_a_host_without_a_node_actor_is_named_with_what_to_do(cluster):
    with pytest.raises(ConfigError, match=r"'node-a', 'node-b', 'node-c'.*need a node actor each.*source: nccl"):
        _ = cluster([HERE, B, C], stock(), met=[]).session


def test_an_actor_on_no_node_of_the_trainer_is_refused(cluster):
    with pytest.raises(ConfigError, match="none of them the actor's node"):
        _ = cluster([B], stock()).session


def test_other_routes_still_want_one_node(cluster):
    with pytest.raises(ConfigError, match=r"route bucket needs trainer and engine on one node"):
        _ = cluster([HERE, B], stock(), route="bucket").session


def test_two_node_actors_of_one_host_are_refused(cluster, actors):
    again = NodeServer(host_name=B)
    try:
        addresses = [actors[B].address, again.address]
        with pytest.raises(ConfigError, match=f"both of host {B}"):
            _ = cluster([HERE, B], stock(), met=addresses).session
    finally:
        again.close()


def test_a_node_actor_that_is_not_there_is_named(cluster):
    with pytest.raises(TransferError, match=r"node actor tcp://127\.0\.0\.1:1"):
        _ = cluster([HERE, B], stock(), met=["tcp://127.0.0.1:1#token"], connect_timeout_s=3.0).session


def test_a_node_actor_with_another_nccl_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(routes_nccl, "nccl_version", lambda: "2.28.9")
    info = SimpleNamespace(device="cuda", nccl="2.28.9", version="0.5.12")
    link = SimpleNamespace(info=info, layouts=[], url="http://e", notes=[])
    check_fits(link, {}, {B: "2.28.9"})
    with pytest.raises(ConfigError, match=r"engine has NCCL 2\.28\.9 and the node actor of node-b NCCL 2\.30\.7"):
        check_fits(link, {}, {B: "2.30.7"})
    assert link.notes == []


def test_an_engine_whose_nccl_nobody_knows_is_taken_to_have_ours_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(routes_nccl, "nccl_version", lambda: "2.28.9")
    info = SimpleNamespace(device="cuda", nccl="", version="0.7.0")
    link = SimpleNamespace(info=info, layouts=[], url="http://e", notes=["route nccl: as configured"])
    for _ in range(2):
        check_fits(link, {}, {B: "2.28.9"})
    (note,) = link.notes[1:]
    assert note.startswith("http://e: which NCCL SGLang 0.7.0 has is not known, 2.28.9 is assumed")
    with pytest.raises(ConfigError, match="node actor of node-b NCCL 2"):
        check_fits(link, {}, {B: "2.30.7"})


def test_a_loopback_rendezvous_is_refused_for_a_node_elsewhere():
    elsewhere = SimpleNamespace(where="tcp://192.0.2.7:5", host="192.0.2.7")
    with pytest.raises(ConfigError, match=r"cannot reach this node at 127\.0\.0\.1: set bind_host"):
        node_module.check_reachable(elsewhere, "127.0.0.1")
    node_module.check_reachable(elsewhere, "192.0.2.1")


def test_a_meeting_place_that_engine_and_other_nodes_reach(monkeypatch):
    asked = []
    monkeypatch.setattr(nodes, "reachable_host", lambda bind, peer_host: asked.append((bind, peer_host)) or "found")
    assert nodes.meeting_host("0.0.0.0", "http://127.0.0.1:1", beyond="192.0.2.7") == "found"
    assert nodes.meeting_host("127.0.0.1", "http://localhost:1", beyond="192.0.2.7") == "found"
    assert nodes.meeting_host("0.0.0.0", "http://192.0.2.9:1", beyond="192.0.2.7") == "found"
    assert asked == [("0.0.0.0", "192.0.2.7"), ("", "192.0.2.7"), ("0.0.0.0", "192.0.2.9")]
