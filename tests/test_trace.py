"""What small loaders do, traced and replayed: the recorded copies and fills must give the bytes that loading gives."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
from torch import nn

from weightsync.live import LiveWeights, bits
from weightsync.spec import Box, Need, TensorSpec, View
from weightsync.trace import Trace, finalise, trace
from weightsync.views import box_of


class Model(nn.Module):
    """Holds named parameters and loads by a function given to it; counts what touched the real parameters."""

    def __init__(self, load, dtype=torch.float32, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            value = torch.full(shape, 0.25).to(dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self._load = load

    def load_weights(self, weights) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            self._load(params, name, tensor)


def specs(**shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]


def traced(model: nn.Module, tensors: list[TensorSpec]) -> Trace:
    """The trace, having checked that it changed nothing: no bit, no place."""
    live = LiveWeights(model)
    before = {s.name: bits(s.tensor()).clone() for s in live.slots}
    result = trace(model, live, tensors)
    assert live.moved() == ""
    assert all(torch.equal(bits(s.tensor()), before[s.name]) for s in live.slots)
    return result


def assert_replays(model: nn.Module, tensors: list[TensorSpec], opaque: set[str] = frozenset()) -> Trace:
    """Trace, load random weights, poison, replay: every tensor but the opaque ones has the loaded bits again."""
    result = traced(model, tensors)
    assert set(result.opaque) == set(opaque)
    generator = torch.Generator().manual_seed(3)
    weights = {t.name: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype)) for t in tensors}
    live = LiveWeights(model)
    with torch.no_grad():
        model.load_weights(iter(weights.items()))
        expected = {s.name: bits(s.tensor()).clone() for s in live.slots}
        live.poison(s.name for s in live.slots if s.name in result.written and s.name not in opaque)
        for need in result.needs:
            live.view(need.view, need.box.size).copy_(box_of(weights[need.tensor], need.box))
        for fill in result.fills:
            live.view(fill.view, fill.size).fill_(fill.value)
        finalise(model)
    for slot in live.slots:
        assert torch.equal(bits(slot.tensor()), expected[slot.name]), slot.name
    return result


def fused(params, name, tensor):
    rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[name]
    params["qkv"].data.narrow(0, *rows).copy_(tensor)


def test_fused_parameter():
    result = assert_replays(Model(fused, qkv=(8, 3)), specs(q=(4, 3), k=(2, 3), v=(2, 3)))
    assert result.needs == [
        Need("q", Box((0, 0), (4, 3)), View(0, 0, (3, 1))),
        Need("k", Box((0, 0), (2, 3)), View(0, 12, (3, 1))),
        Need("v", Box((0, 0), (2, 3)), View(0, 18, (3, 1))),
    ]
    assert result.ignored == [] and result.fills == [] and result.derived == []


@pytest.mark.parametrize("rank", [0, 1])
def test_sliced_along_each_dim(rank):
    def load(params, name, tensor):
        dim = {"column": 0, "row": 1}[name]
        params[name].data.copy_(tensor.narrow(dim, rank * 3, 3))

    result = assert_replays(Model(load, column=(3, 4), row=(5, 3)), specs(column=(6, 4), row=(5, 6)))
    assert [n.box.offset for n in result.needs] == [(rank * 3, 0), (0, rank * 3)]


def test_transposed_flattened_and_chunked():
    def load(params, name, tensor):
        if name == "t":
            params["t"].data.copy_(tensor.t())
        elif name == "flat":
            params["flat"].data.copy_(tensor.view(-1))
        elif name == "experts":
            for e, part in enumerate(tensor.unbind(0)):
                gate, up = part.chunk(2, dim=-1)
                params["w13"].data[e, :3].copy_(gate.t())
                params["w13"].data[e, 3:].copy_(up.transpose(0, 1))

    model = Model(load, t=(3, 4), flat=(12,), w13=(2, 6, 5))
    result = assert_replays(model, specs(t=(4, 3), flat=(3, 4), experts=(2, 5, 6)))
    assert len([n for n in result.needs if n.tensor == "experts"]) == 4


def test_parameter_stored_transposed():
    def load(params, name, tensor):
        params["w"].data.t()[:, :2].copy_(tensor)

    model = Model(load)
    model.w = nn.Parameter(torch.zeros(4, 6).t(), requires_grad=False)  # shape (6, 4), strides (1, 6)
    live = LiveWeights(model)
    result = trace(model, live, specs(a=(4, 2)))
    assert result.needs == [Need("a", Box((0, 0), (4, 2)), View(0, 0, (6, 1)))]


def test_padding_is_a_fill():
    def load(params, name, tensor):
        params["embed"].data[:5].copy_(tensor)
        params["embed"].data[5:].fill_(0)
        params["head"].data.zero_()
        params["head"].data[1:6].copy_(tensor)

    result = assert_replays(Model(load, embed=(8, 2), head=(8, 2)), specs(words=(5, 2)))
    assert sum(f.size[0] for f in result.fills) == 6


def test_assignment_of_a_number_is_a_fill():
    def load(params, name, tensor):
        params["w"].data[:2] = tensor
        params["w"].data[2:] = 1.5

    assert [f.value for f in assert_replays(Model(load, w=(4, 2)), specs(a=(2, 2))).fills] == [1.5]


@pytest.mark.parametrize(
    ("compute", "operator"),
    [
        (lambda t: torch.cat([t, t])[:4], "aten.cat"),
        (lambda t: t.clone(), "aten.clone"),
        (lambda t: t + 1, "aten.add"),
        (lambda t: t.t().contiguous().t(), "aten.clone"),
    ],
)
def test_computed_source_is_opaque(compute, operator):
    def load(params, name, tensor):
        params[name].data.copy_(compute(tensor) if name == "a" else tensor)

    result = assert_replays(Model(load, a=(4, 2), b=(4, 2)), specs(a=(4, 2), b=(4, 2)), opaque={"a"})
    assert operator in result.opaque["a"]
    assert [n.tensor for n in result.needs] == ["b"]
    assert result.ignored == []


@pytest.mark.parametrize("view", [lambda t: t[::2], lambda t: t[:1].expand(2, 2)])
def test_views_that_are_no_boxes_are_opaque(view):
    def load(params, name, tensor):
        params["a"].data.copy_(view(tensor))

    result = assert_replays(Model(load, a=(2, 2)), specs(a=(4, 2)), opaque={"a"})
    assert "no box" in result.opaque["a"]


def test_other_writes_are_opaque():
    def load(params, name, tensor):
        params["a"].data.copy_(tensor)
        params["a"].data.mul_(2)
        params["b"].data.view(torch.int32).copy_(torch.ones(2, 2, dtype=torch.int32))
        params["c"].data.copy_(tensor)
        params["c"].data[1:].copy_(tensor[:1])

    result = assert_replays(Model(load, a=(2, 2), b=(2, 2), c=(2, 2)), specs(x=(2, 2)), opaque={"a", "b", "c"})
    assert "aten.mul_" in result.opaque["a"]
    assert "int32" in result.opaque["b"]
    assert "part of an earlier copy" in result.opaque["c"]


def test_the_later_of_two_writes_wins():
    def load(params, name, tensor):
        params["a"].data.copy_(tensor)

    assert [n.tensor for n in assert_replays(Model(load, a=(2, 2)), specs(x=(2, 2), y=(2, 2))).needs] == ["y"]


def test_one_write_over_several_parameters_is_opaque():
    memory = torch.zeros(2, 3)

    def load(params, name, tensor):
        memory.copy_(tensor)

    model = Model(load)
    model.first, model.second = (nn.Parameter(memory[i], requires_grad=False) for i in range(2))
    result = traced(model, specs(x=(2, 3)))
    assert result.opaque == dict.fromkeys(("first", "second"), "one write spans several tensors")


def test_a_cast_to_the_parameters_dtype_is_followed():
    def load(params, name, tensor):
        params[name].data.copy_(tensor.to(params[name].dtype))

    model = Model(load, torch.bfloat16, a=(8, 4))
    model.bias = nn.Parameter(torch.zeros(4), requires_grad=False)  # float32 in a bfloat16 model
    result = traced(model, specs(a=(8, 4), bias=(4,)))
    assert result.opaque == {} and [n.tensor for n in result.needs] == ["a", "bias"]


def test_a_cast_that_loses_bits_on_the_way_is_opaque():
    def load(params, name, tensor):
        params[name].data.copy_(tensor.to(torch.bfloat16) if name == "narrow" else tensor.double())

    result = traced(Model(load, narrow=(2, 2), wide=(2, 2)), specs(narrow=(2, 2), wide=(2, 2)))
    assert list(result.opaque) == ["narrow"] and "bfloat16" in result.opaque["narrow"]
    assert [n.tensor for n in result.needs] == ["wide"]


def test_a_loader_that_asks_for_a_value_makes_the_whole_model_opaque():
    def load(params, name, tensor):
        if tensor.numel() == 1:
            params[name].data.fill_(tensor.item())
        else:
            params[name].data.copy_(tensor)

    result = traced(Model(load, scale=(1,), w=(2, 2)), specs(w=(2, 2), scale=(1,)))
    assert set(result.opaque) == {"scale", "w"} and result.needs == []
    assert "cannot be traced" in result.opaque["w"]


def test_a_loader_that_raises_makes_the_whole_model_opaque():
    def load(params, name, tensor):
        params[name].data.copy_(tensor)
        raise KeyError("layers.7.unknown")

    result = traced(Model(load, a=(2, 2)), specs(a=(2, 2)))
    assert "KeyError: 'layers.7.unknown'" in result.opaque["a"] and result.needs == []


def test_thread_pools_of_the_loader_run_here_and_those_of_others_do_not():
    asked, started, go_on = [], threading.Event(), threading.Event()

    def other():
        started.wait(5)
        with ThreadPoolExecutor(1) as pool:
            asked.append(pool.submit(threading.get_ident).result(5))
        go_on.set()

    class Pooled(Model):
        def load_weights(self, weights):
            params = dict(self.named_parameters())
            started.set()
            assert go_on.wait(5)
            with ThreadPoolExecutor() as pool:
                futures = [pool.submit(params[n].data.copy_, t) for n, t in weights]
                for future in as_completed(futures):
                    future.result()

    thread = threading.Thread(target=other)
    thread.start()
    result = traced(Pooled(None, a=(2, 2), b=(3,)), specs(a=(2, 2), b=(3,)))
    thread.join()
    assert [n.tensor for n in result.needs] == ["a", "b"] and result.opaque == {}
    assert asked and asked[0] not in (thread.ident, threading.get_ident())


def test_an_error_in_a_pool_reaches_the_loader():
    class Pooled(Model):
        def load_weights(self, weights):
            with ThreadPoolExecutor() as pool:
                pool.submit(lambda: 1 / 0).result()

    assert "ZeroDivisionError" in traced(Pooled(None, a=(2, 2)), specs(a=(2, 2))).opaque["a"]


def test_unused_tensors_are_ignored_and_unwritten_parameters_are_not_needs():
    def load(params, name, tensor):
        if name in params:
            params[name].data.copy_(tensor)

    result = traced(Model(load, a=(2, 2), b=(2, 2)), specs(a=(2, 2), other=(5,)))
    assert result.ignored == ["other"] and result.written == {"a"}


def test_integers_and_no_dims():
    class Counted(Model):
        def __init__(self, load):
            super().__init__(load, a=(2, 2))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("bias", torch.zeros(3))

        def load_weights(self, weights):
            held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            for name, tensor in weights:
                held[name].data.copy_(tensor)

    tensors = [*specs(a=(2, 2), bias=(3,)), TensorSpec("count", (), "int64")]
    result = assert_replays(Counted(None), tensors)
    assert Need("count", Box((), ()), View(1, 0, ())) in result.needs


class Absorbed(Model):
    """Like multi-head latent attention: serves from a plain tensor computed from a parameter after loading."""

    def __init__(self, load, absorb) -> None:
        super().__init__(load, kv=(4, 2))
        self._absorb = absorb
        self.post_load_weights()

    def load_weights(self, weights):
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self):
        absorbed = self.kv.data.t().contiguous()
        if self._absorb == "in place" and hasattr(self, "w_kc"):
            self.w_kc.copy_(absorbed)
        else:
            self.w_kc = absorbed


def copy_by_name(params, name, tensor):
    params[name].data.copy_(tensor)


@pytest.mark.parametrize("absorb", ["in place", "replaced"])
def test_tensors_computed_after_loading_are_derived(absorb):
    model = Absorbed(copy_by_name, absorb)
    result = assert_replays(model, specs(kv=(4, 2)))
    assert result.derived == ["w_kc"]


def test_what_only_loading_computes_is_opaque():
    class Loaded(Absorbed):
        def load_weights(self, weights):
            Model.load_weights(self, weights)
            self.scale.fill_(2.0).mul_(3.0)

        def post_load_weights(self):
            self.scale = torch.ones(2)

    model = Loaded(copy_by_name, "")
    Loaded.post_load_weights = lambda self: None
    assert "post_load_weights does not" in traced(model, specs(kv=(4, 2))).opaque["scale"]


def test_replaced_parameters_are_put_back_and_opaque():
    def load(params, name, tensor):
        if name == "a":
            params["a"].data = torch.ones(2, 2)
        else:
            params[name].data.copy_(tensor)

    model = Model(load, a=(2, 2), b=(2, 2))
    result = traced(model, specs(a=(2, 2), b=(2, 2)))
    assert list(result.opaque) == ["a"] and "replaces it" in result.opaque["a"]


def test_tied_parameters_are_one_tensor():
    def load(params, name, tensor):
        params["embed"].data.copy_(tensor)

    model = Model(load, embed=(4, 2))
    model.head = nn.Linear(2, 4, bias=False)
    model.head.weight = model.embed
    live = LiveWeights(model)
    assert [(s.name, s.aliases) for s in live.slots] == [("embed", ["head.weight"])]
    assert len(trace(model, live, specs(embed=(4, 2))).needs) == 1


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("traced_in", [True, False])
def test_inference_mode(made, traced_in):
    with torch.inference_mode(made):
        model = Model(fused, qkv=(8, 3))
    with torch.inference_mode(traced_in):
        assert len(traced(model, specs(q=(4, 3), k=(2, 3), v=(2, 3))).needs) == 3
