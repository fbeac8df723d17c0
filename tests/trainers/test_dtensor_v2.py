"""Real FSDP2 and TP ranks: whatever the cut, what all ranks export together is the unsharded model, to the bit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.trainers.ranks import Ranks, unsharded
from tests.trainers.reading import Reading
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError
from weightsync.fingerprint import fingerprint
from weightsync.fingerprint_weights import MASK
from weightsync.publisher import SealRequest
from weightsync.spec import Sealed
from weightsync.trainers.dtensor_v2 import reader

LAYOUTS = {2: ["ddp", "fsdp", "fsdp_each"], 4: ["fsdp", "hsdp", "column", "row"]}


@pytest.fixture(scope="module")
def fleets(tmp_path_factory):
    """Ranks by world size, started on first use and kept for the module."""
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        if world not in started:
            started[world] = Ranks(world, str(tmp_path_factory.mktemp("store") / "file"))
        return started[world]

    yield of
    for ranks in started.values():
        ranks.close()


@pytest.fixture
def offered(fleets):
    """Start publishers over ``world`` ranks in a layout; everything is closed again."""
    readings = []

    def start(world: int, layout: str, dtype: str = "float32") -> tuple[Ranks, Reading]:
        ranks = fleets(world)
        readings.append(Reading(ranks.call("offer", layout, dtype)))
        return ranks, readings[-1]

    yield start
    for reading in readings:
        reading.close()


@pytest.mark.parametrize(("world", "layout"), [(w, layout) for w, layouts in LAYOUTS.items() for layout in layouts])
def test_shards_of_all_ranks_are_the_unsharded_tensors(offered, world, layout):
    ranks, reading = offered(world, layout)
    described = reading.describe()
    assert [d.rank for d in described] == list(range(world))
    assert all(s.segment == -1 for d in described for s in d.shards)
    reading.export()
    ranks.call("step_done", 1)
    reading.publish(1)
    whole, expected = reading.assembled(described[0].rules), unsharded()
    assert set(whole) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(whole[name], tensor), name
    assert all(not s.changed for s in reading.seal(1))


@pytest.mark.parametrize(("world", "layout"), [(2, "fsdp"), (4, "fsdp"), (4, "column")])
def test_a_rank_that_owns_nothing_takes_part_and_exports_no_bytes_for_it(offered, world, layout):
    ranks, reading = offered(world, layout)
    exports = reading.export()
    ranks.call("step_done", 1)
    reading.publish(1)
    sealed = reading.seal(1)
    names = {s.tensor for s in exports[0].shards}
    for rank, export in enumerate(exports):
        assert {s.tensor for s in export.shards} == names
        empty = [s for s in export.shards if 0 in s.box.size]
        assert all(s.segment == -1 for s in empty)
        assert len(sealed[rank].published) == len(export.shards) - len(empty)
    assert any(0 in s.box.size for s in exports[-1].shards)


def test_fingerprints_of_shards_add_up_to_that_of_the_whole(offered):
    ranks, reading = offered(4, "column")
    exports = reading.export()
    ranks.call("step_done", 1)
    sums: dict[str, dict] = {}
    reading.publish(1)
    for rank, sealed in enumerate(reading.seal(1)):
        held = [s for s in exports[rank].shards if s.segment >= 0]
        for shard, number in zip(held, sealed.published, strict=True):
            sums.setdefault(shard.tensor, {})[shard.box] = number
    for name, tensor in unsharded().items():
        assert sum(sums[name].values()) & MASK == fingerprint(tensor, (0,) * tensor.dim()), name


@pytest.mark.parametrize("how", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("layout", ["fsdp", "column"])
def test_an_optimizer_step_during_the_move_is_reported_by_name(offered, how, layout):
    ranks, reading = offered(4, layout)
    exports = reading.export()
    ranks.call("step_done", 3)
    reading.publish(3)
    ranks.call_one(1, "optimize", how)
    sealed = reading.seal(3)
    own = {s.tensor for s in exports[1].shards if s.segment >= 0 and not s.is_buffer}
    assert own
    assert own <= set(sealed[1].changed)
    assert sealed[1].fingerprints != sealed[1].published
    without = SealRequest(step=3, regions=[])
    unread = reading.clients[1].call("seal", without, deadline=Deadline(30, "test"), returns=Sealed)
    assert own <= set(unread.changed), "noticed without fingerprints too"
    for rank in (0, 2, 3):
        assert sealed[rank].changed == []
        assert sealed[rank].fingerprints == sealed[rank].published


def test_a_write_that_no_version_counter_sees_is_found_by_fingerprint(offered):
    ranks, reading = offered(2, "fsdp")
    reading.export()
    ranks.call("step_done", 1)
    reading.publish(1)
    ranks.call_one(0, "write_past_torch")
    sealed = reading.seal(1)
    assert sealed[0].changed == ["layers.0.weight"]
    assert sealed[0].fingerprints != sealed[0].published
    assert sealed[1].fingerprints == sealed[1].published


def test_sharded_parameters_are_published_while_fsdp_shows_gathered_ones(offered):
    ranks, reading = offered(2, "fsdp")
    reading.export()
    assert ranks.call("forward") != [[], []], "the root is expected to stay gathered after a forward pass"
    ranks.call("step_done", 1)
    reading.publish(1)
    whole = reading.assembled(reading.describe()[0].rules)
    for name, tensor in unsharded().items():
        assert torch.equal(whole[name], tensor), name
    assert all(s.changed == [] for s in reading.seal(1))


def test_a_publisher_made_of_a_gathered_model_offers_its_shards(offered, fleets):
    ranks, _ = offered(2, "fsdp")
    ranks.call("forward")
    reading = Reading(ranks.call("offer_again"))
    boxes = [{s.tensor: s.box.size for s in d.shards} for d in reading.describe()]
    assert boxes[0]["layers.0.weight"] == (3, 3)
    assert boxes[1]["layers.0.weight"] == (2, 3)
    reading.close()


def test_tensors_are_cast_in_the_arena_as_torch_casts_them(offered):
    ranks, reading = offered(2, "fsdp")
    names = [s.tensor for s in reading.describe()[0].shards]
    exports = reading.export(dict.fromkeys(names, "bfloat16"))
    assert {s.dtype for e in exports for s in e.shards} == {"bfloat16"}
    ranks.call("step_done", 1)
    reading.publish(1)
    whole = reading.assembled(reading.describe()[0].rules)
    for name, tensor in unsharded().items():
        assert torch.equal(whole[name], tensor.bfloat16()), name
    for sealed in reading.seal(1):
        assert sealed.fingerprints == sealed.published != []


def test_memory_that_moves_is_read_where_it_is_at_the_next_push(offered):
    ranks, reading = offered(2, "fsdp")
    names = [s.tensor for s in reading.describe()[0].shards]
    exports = reading.export(dict.fromkeys(names, "float32"))
    ranks.call("replace_memory")
    ranks.call("step_done", 1)
    published = reading.publish(1)
    assert [p.generation for p in published] == [e.generation for e in exports], "the arena stays where it was"
    whole = reading.assembled(reading.describe()[0].rules)
    for name, tensor in unsharded().items():
        assert torch.equal(whole[name], tensor), name


@pytest.mark.parametrize(
    ("what", "words"),
    [("partial", ["layers.0.weight", "not reduced"]), ("strided", ["layers.0.weight", "not one box"])],
)
def test_shards_that_are_no_boxes_of_values_are_refused_by_name(fleets, what, words):
    for refusal in fleets(4).call("refused", what):
        assert refusal.startswith("ConfigError")
        assert all(word in refusal for word in words), refusal


@pytest.mark.parametrize("layout", ["ep4", "ep2"])
def test_experts_stacked_in_one_tensor_and_cut_over_ranks_arrive_one_by_one(fleets, layout):
    ranks = fleets(4)
    reading = Reading(ranks.call("offer_experts", layout))
    reading.export()
    ranks.call("step_done", 1)
    reading.publish(1)
    whole = reading.assembled(reading.describe()[0].rules)
    assert len(whole) == 24
    for expert in range(8):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        assert torch.equal(whole[f"{prefix}.gate_proj.weight"], torch.full((2, 3), float(expert)))
        assert torch.equal(whole[f"{prefix}.up_proj.weight"], torch.full((2, 3), expert + 0.5))
        assert torch.equal(whole[f"{prefix}.down_proj.weight"], torch.full((3, 2), expert + 0.25))
    reading.close()


def test_a_closed_publisher_leaves_no_file_in_any_rank(offered):
    ranks, reading = offered(4, "fsdp")
    reading.export()
    assert ranks.call("close") == [[], [], [], []]


# ------------------------------------------------------------------------------------------- one process is enough


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.embed_tokens = nn.Embedding(6, 4)
        self.lm_head.weight = self.embed_tokens.weight


@pytest.mark.parametrize("as_mapping", [True, False])
def test_tied_parameters_are_read_once_by_the_embeddings_name(as_mapping):
    model = Tied()
    source = model.state_dict() if as_mapping else model
    expected = "embed_tokens.weight" if as_mapping else "lm_head.weight"
    assert [h.name for h in reader(source).read()] == [expected]


def test_buffers_of_a_checkpoint_are_read_and_marked_and_others_are_not():
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("e_score_correction_bias", torch.zeros(2))
            self.register_buffer("inv_freq", torch.zeros(2), persistent=False)

    held = reader(nn.ModuleDict({"gate": Router()})).read()
    assert {h.name: h.is_buffer for h in held} == {"gate.weight": False, "gate.e_score_correction_bias": True}


def test_values_of_a_mapping_are_looked_up_at_every_read():
    tensors = {"a": torch.zeros(2)}
    source = reader(tensors)
    tensors["a"] = torch.ones(2)
    assert source.read()[0].tensor.data_ptr() == tensors["a"].data_ptr()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"q_proj.lora_A.default.weight": torch.ones(1)}, ["lora_A", "merge"]),
        ({"mlp.experts.lora_gate_and_up_A": torch.ones(1)}, ["lora_gate_and_up_A", "merge"]),
        ({"x._orig_mod.w": torch.ones(1), "x.w": torch.ones(1)}, ["x._orig_mod.w", "x.w"]),
        ({"w": torch.empty(2, device="meta")}, ["w", "meta"]),
        ({"w": torch.eye(2).to_sparse()}, ["w", "sparse"]),
        ({"_fsdp_wrapped_module._flat_param": torch.ones(4)}, ["_flat_param", "fully_shard"]),
    ],
)
def test_what_cannot_be_published_is_refused_by_name(tensors, words):
    with pytest.raises(ConfigError) as refused:
        reader(tensors).read()
    assert all(word in str(refused.value) for word in words)


def test_something_else_than_a_model_is_refused():
    with pytest.raises(ConfigError, match="list"):
        reader([torch.ones(1)])


def test_nothing_here_keeps_memory_alive_between_reads():
    model = nn.Linear(4, 4)
    source = reader(model)
    assert len(source.read()) == 2
    gone = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert gone() is None
    assert torch.equal(source.read()[0].tensor, torch.zeros(4, 4))
