"""The stock sender: what it puts on the wire is what SGLang's own unpickler and bucket reader expect."""

from __future__ import annotations

import base64
import io
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import stock, stock_group
from benchmarks.rank_wire import StockRequest

ALLOWED = ("torch.", "collections.", "types.SimpleNamespace", "builtins.", "multiprocessing.")


class Strict(pickle.Unpickler):
    """Notes every global that a payload names."""

    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(base64.b64decode(text)))
        self.named: set[str] = set()

    def find_class(self, module: str, name: str):
        self.named.add(f"{module}.{name}")
        return super().find_class(module, name)


def tensors(*sizes: int) -> list[stock.Named]:
    return [(f"t{i}", torch.arange(size, dtype=torch.float32) + i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, [["t0"], ["t1"], ["t2"]]),
        (-1, [["t0", "t1", "t2"]]),
        (48, [["t0", "t1"], ["t2"]]),
        (8, [["t0"], ["t1"], ["t2"]]),
    ],
)
def test_chunks_keep_the_order_and_the_limit(limit, expected):
    found = list(stock.chunks(tensors(8, 4, 100), limit))
    assert [[name for name, _ in chunk] for chunk in found] == expected


def test_a_flattened_bucket_is_taken_apart_by_its_metadata():
    named = [("a", torch.randn(3, 5)), ("b", torch.randn(2, 2).to(torch.bfloat16).t()), ("c", torch.tensor(7.0))]
    flat = stock.flatten(named)
    for (name, tensor), meta in zip(named, flat["metadata"], strict=True):
        part = flat["flattened_tensor"][meta.start_idx : meta.end_idx]
        assert meta.name == name
        assert meta.numel == part.numel()
        assert torch.equal(part.view(meta.dtype).reshape(meta.shape), tensor)


def test_a_payload_on_the_cpu_names_only_what_the_engine_allows_and_carries_the_bytes():
    content = stock.flatten(tensors(8, 4))
    payload = stock.serialize(content)
    reader = Strict(payload)
    found = reader.load()
    assert all(name.startswith(ALLOWED) for name in reader.named), reader.named
    assert torch.equal(found["flattened_tensor"], content["flattened_tensor"])
    assert isinstance(found["metadata"][0], SimpleNamespace)
    assert len(payload) < 4000  # a reference to shared memory, not the bytes


def test_a_list_of_tensors_shares_copies_so_that_the_trainers_storage_stays_where_it_is():
    (named,) = stock.chunks(tensors(8, 4), -1)
    where = [tensor.data_ptr() for _, tensor in named]
    content, load_format = stock._content(named, flattened=False)
    found = Strict(stock.serialize(content)).load()
    assert load_format is None
    assert [tensor.data_ptr() for _, tensor in named] == where
    assert not any(tensor.is_shared() for _, tensor in named)
    assert [(name, tensor.tolist()) for name, tensor in found] == [(name, tensor.tolist()) for name, tensor in named]


def test_a_cuda_handle_names_its_gpu_by_uuid(monkeypatch):
    handle = tuple(range(20))
    monkeypatch.setattr(stock.reductions, "reduce_tensor", lambda tensor: (print, handle))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="8a1b-uuid"))
    fake = SimpleNamespace(is_cuda=True, device="cuda:3")
    monkeypatch.setattr(stock.torch, "Tensor", SimpleNamespace)
    rebuild, arguments = stock._Pickler(io.BytesIO()).reducer_override(fake)
    assert rebuild is print
    assert arguments == (*range(6), "8a1b-uuid", *range(7, 20))


def test_repeat_drops_the_first_run_and_stops_when_the_time_is_up():
    runs = iter(range(100))
    assert stock.repeat(lambda: float(next(runs)), 4, 60.0) == [1.0, 2.0, 3.0, 4.0]
    runs = iter(range(100))
    assert stock.repeat(lambda: float(next(runs)), 4, 0.0) == [1.0]


def test_repeat_asks_all_ranks_before_it_goes_on():
    asked = []

    def agree(more: bool) -> bool:
        asked.append(more)
        return len(asked) < 3

    assert len(stock.repeat(lambda: 1.0, 100, 60.0, agree=agree)) == 3
    assert asked == [True, True, True]


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 0)), (1, (0, 0)), (2, (1, 2)), (3, (1, 2))])
def test_ranks_are_shared_out_among_engines_in_order(monkeypatch, rank, expected):
    monkeypatch.setattr(stock.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(stock.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(stock.dist, "new_group", tuple)
    found = stock.share(2, 2)
    assert (found.engine, found.first) == expected
    assert found.group == ((0, 1), (2, 3))[found.engine]
    assert found.ranks == 2
    with pytest.raises(AssertionError, match="3 engines"):
        stock.share(3, 1)


@pytest.mark.parametrize(("ranks", "tp_size", "counts"), [(2, 4, (2, 2)), (2, 2, (1, 1)), (4, 2, (1, 1, 0, 0))])
def test_every_engine_rank_gets_one_payload(monkeypatch, ranks, tp_size, counts):
    sent = []

    def gather(made, gathered, dst, group):
        sent.append(len(made))
        if gathered is not None:
            gathered[:] = [made] * ranks

    monkeypatch.setattr(stock, "serialize", lambda content: "payload")
    monkeypatch.setattr(stock.dist, "gather_object", gather)
    for rank in range(ranks):
        monkeypatch.setattr(stock.dist, "get_rank", lambda rank=rank: rank)
        stock._payloads([], stock.Share(0, tp_size, None, ranks, 0))
    assert tuple(sent) == counts


def test_the_sender_needs_no_sglang():
    assert "sglang" not in sys.modules


class Answering:
    """An engine that answers everything at once. ``calls``: what it was asked."""

    url = "http://engine"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        return lambda: self.calls.append(name)


@pytest.mark.parametrize("left_s", [0.0, 5.0])
def test_a_broadcast_push_is_over_with_the_last_answer_and_the_last_byte(monkeypatch, left_s):
    group = object.__new__(stock_group.Group)
    group._engine, group._on_gpu, sent = Answering(), False, []
    monkeypatch.setattr(group, "_send", lambda chunk, flattened: sent.append([name for name, _ in chunk]))
    monkeypatch.setattr(stock_group._Clock, "seconds", lambda self: left_s)
    monkeypatch.setattr(stock_group, "generate", lambda url, count: group._engine.calls.append(f"{count} of {url}"))
    took = group.push(tensors(8, 4), StockRequest("float32", -1, flattened=False, distributed=True, with_token=True))
    assert sent == [["t0", "t1"]]
    assert group._engine.calls == ["pause", "begin", "end", "resume", "1 of http://engine"]
    assert 0 < took.answered < took.token < 1
    assert took.whole == took.answered if not left_s else took.whole > 5
    assert took.calls == pytest.approx(left_s, abs=0.5) and took.calls <= took.whole


def test_without_a_gpu_the_clock_stands_still():
    clock = stock_group._Clock(on_gpu=False)
    clock.mark()
    assert clock.seconds() == 0.0
