"""The Megatron reader on stand-ins: what it says of each rank's part, and what it refuses by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.megatron import Chunk, Group, Wrapper, parameter
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, TransferError
from weightsync.publisher import ExportRequest, Publisher, PublishRequest, SealRequest
from weightsync.rpc import Client
from weightsync.sources import Sources, map_sources
from weightsync.spec import Export, Published, Sealed, Shard, SourceRegion, View
from weightsync.trainers import Held, megatron
from weightsync.transports import shm

OPTIONS = {"model_type": "qwen3", "vocab_size": 101}
LAYER = "decoder.layers.0."


def assembled(readers: Sequence[megatron.MegatronReader]) -> dict[str, torch.Tensor]:
    """Each Hugging Face tensor, put together from what all ranks hold; NaN where no rank holds it."""
    held, sources = _sources(readers)
    result = {}
    for name, source in sources.tensors.items():
        result[name] = torch.full(source.spec.shape, float("nan"))
        for box, members in source.layout.groups:
            for member in members:
                local = held[member.rank][source.holders[member.holder].shard].tensor
                start = local.storage_offset() + member.offset
                result[name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] = (
                    local.as_strided(box.size, member.strides, start)
                )
    return result


def _sources(readers: Sequence[megatron.MegatronReader]) -> tuple[list[list[Held]], Sources]:
    held = [reader.read() for reader in readers]
    shards = {
        rank: [Shard(h.name, h.shape, h.dtype, h.box, h.tensor.stride(), is_buffer=h.is_buffer) for h in own]
        for rank, own in enumerate(held)
    }
    rules = dict.fromkeys(rule for reader, own in zip(readers, held, strict=True) for rule in reader.rules(own))
    return held, map_sources(shards, list(rules), [], [])


def read_one(tensors: dict[str, torch.Tensor], options: dict[str, Any] | None = None, **chunk: Any) -> list[Held]:
    return megatron.reader(Chunk(tensors, **chunk), **(options or OPTIONS)).read()


# ------------------------------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_101_words_padded_to_128_are_101_rows_of_embedding_and_head(tied: bool) -> None:
    rows = torch.arange(128.0)[:, None] * torch.ones(3)
    readers = []
    for rank in range(2):
        own = rows[64 * rank : 64 * rank + 64]
        names = {"embedding.word_embeddings.weight": own, "output_layer.weight": own if tied else own + 1000}
        tensors = {name: parameter(data.clone(), 0) for name, data in names.items()}
        readers.append(megatron.reader(Chunk(tensors, tied=tied, tp=Group(rank, 2)), **OPTIONS))

    got = assembled(readers)

    assert torch.equal(got["model.embed_tokens.weight"], rows[:101])
    assert set(got) == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert tied or torch.equal(got["lm_head.weight"], rows[:101] + 1000)


def test_a_true_vocabulary_larger_than_the_padded_one_is_refused() -> None:
    reader = megatron.reader(Chunk({"output_layer.weight": parameter(torch.ones(100, 3), 0)}), **OPTIONS)

    with pytest.raises(ConfigError, match=r"vocab_size is 101, but output_layer\.weight has only 100 rows"):
        reader.rules(reader.read())


# ---------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("model_type", "down"), [("qwen3_moe", "mlp.experts.{}.down_proj"), ("mixtral", None)])
def test_expert_i_of_8_over_4_expert_ranks_holds_i(grouped: bool, model_type: str, down: str | None) -> None:
    down = down or "block_sparse_moe.experts.{}.w2"
    readers = []
    for rank in range(4):
        tensors = {}
        for local in range(2):
            prefix = "linear_{}.weight" + str(local) if grouped else f"local_experts.{local}.linear_{{}}.weight"
            expert = float(2 * rank + local)
            gate_up = torch.cat([torch.full((5, 3), expert), torch.full((5, 3), expert + 100)])
            tensors[f"{LAYER}mlp.experts.{prefix.format('fc1')}"] = parameter(gate_up, 0)
            tensors[f"{LAYER}mlp.experts.{prefix.format('fc2')}"] = parameter(torch.full((3, 5), expert), 1)
        chunk = Chunk(tensors, ep=Group(rank, 4), num_moe_experts=8)
        readers.append(megatron.reader(chunk, model_type=model_type, vocab_size=101))

    got = assembled(readers)

    assert len(got) == 24
    gate, up = down.replace("w2", "w1").replace("down", "gate"), down.replace("w2", "w3").replace("down", "up")
    for expert in range(8):
        for name, value in ((gate, expert), (up, expert + 100), (down, expert)):
            assert (got[f"model.layers.0.{name.format(expert)}.weight"] == value).all()


def test_expert_tensor_parallelism_cuts_gate_and_up_each() -> None:
    gate, up = torch.arange(24.0).view(8, 3), torch.arange(24.0).view(8, 3) + 100
    readers = []
    for rank in range(2):
        rows = slice(4 * rank, 4 * rank + 4)
        weight = parameter(torch.cat([gate[rows], up[rows]]), 0)
        chunk = Chunk({f"{LAYER}mlp.experts.linear_fc1.weight0": weight}, expt_tp=Group(rank, 2), tp=Group(1, 4))
        chunk.config.num_moe_experts = 1
        readers.append(megatron.reader(chunk, model_type="qwen3_moe", vocab_size=101))

    got = assembled(readers)

    assert torch.equal(got["model.layers.0.mlp.experts.0.gate_proj.weight"], gate)
    assert torch.equal(got["model.layers.0.mlp.experts.0.up_proj.weight"], up)


# ------------------------------------------------------------------------------------------------------------ layers


def test_layers_count_over_virtual_stages_and_wrappers_are_taken_off() -> None:
    norm = f"{LAYER}input_layernorm.weight"
    chunks = [
        Wrapper(Wrapper(Chunk({norm: parameter(torch.ones(3))}, first_layer=first, num_layers=8))) for first in (1, 5)
    ]

    held = megatron.reader(chunks, **OPTIONS).read()

    assert [h.name for h in held] == [
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.5.input_layernorm.weight",
    ]


def test_two_chunks_of_one_layer_are_refused() -> None:
    chunks = [Chunk({f"{LAYER}input_layernorm.weight": parameter(torch.ones(3))}) for _ in range(2)]

    with pytest.raises(ConfigError, match=r"hold layers \[1\] twice; build each chunk with its vp_stage"):
        megatron.reader(chunks, **OPTIONS)


@pytest.mark.parametrize(
    ("pattern", "layers"), [("*-*-", [0, 0, 1, 1]), ("+E|+E/M", [0, 0, 1, 1]), ("M*-", [None, 0, 0])]
)
def test_attention_and_feed_forward_of_a_hybrid_model_are_one_layer(pattern: str, layers: list[int | None]) -> None:
    tensors = {f"decoder.layers.{i}.pre_mlp_layernorm.weight": parameter(torch.ones(3)) for i in range(len(layers))}
    reader = megatron.reader(Chunk(tensors, pattern=pattern), **OPTIONS)

    rules = {rule.source: rule.target for rule in reader.rules(reader.read())}

    assert [rules.get(name) for name in tensors] == [
        None if layer is None else f"model.layers.{layer}.post_attention_layernorm.weight" for layer in layers
    ]


def test_a_hybrid_pattern_of_no_known_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="feed-forward layer 2 does not follow an attention layer"):
        megatron.reader(Chunk({}, pattern="*--"), **OPTIONS)


# -------------------------------------------------------------------------------------------------------- attention


def test_the_fused_latent_down_projection_is_split() -> None:
    rows = torch.arange(9.0)[:, None] * torch.ones(3)
    tensors = {
        f"{LAYER}self_attention.linear_qkv_down_proj.weight": parameter(rows.clone()),
        f"{LAYER}self_attention.linear_qkv_down_proj.layer_norm_weight": parameter(torch.full((3,), 7.0)),
        f"{LAYER}self_attention.q_layernorm.weight": parameter(torch.full((5,), 8.0)),
    }
    chunk = Chunk(tensors, multi_latent_attention=True, q_lora_rank=5)

    got = assembled([megatron.reader(chunk, model_type="deepseek_v3", vocab_size=101)])

    prefix = "model.layers.0."
    assert torch.equal(got[f"{prefix}self_attn.q_a_proj.weight"], rows[:5])
    assert torch.equal(got[f"{prefix}self_attn.kv_a_proj_with_mqa.weight"], rows[5:])
    assert (got[f"{prefix}input_layernorm.weight"] == 7).all()
    assert (got[f"{prefix}self_attn.q_a_layernorm.weight"] == 8).all()


def test_a_fused_qkv_of_other_heads_is_refused() -> None:
    reader = megatron.reader(
        Chunk({f"{LAYER}self_attention.linear_qkv.weight": parameter(torch.ones(50, 3), 0)}), **OPTIONS
    )

    with pytest.raises(ConfigError, match="has 50 rows; 4 heads in 2 groups of size 6 make 48"):
        reader.rules(reader.read())


# ------------------------------------------------------------------------------------------------------------ norms


def test_zero_centred_norms_are_published_plus_one_and_nothing_else_is() -> None:
    tensors = {
        f"{LAYER}self_attention.linear_qkv.layer_norm_weight": parameter(torch.tensor([0.25, -0.5]).bfloat16()),
        f"{LAYER}self_attention.q_layernorm.weight": parameter(torch.tensor([0.0])),
        "decoder.final_layernorm.weight": parameter(torch.tensor([1.0])),
        f"{LAYER}mlp.linear_fc2.weight": parameter(torch.ones(2, 2), 1),
    }
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    held = read_one(tensors, layernorm_zero_centered_gamma=True)

    published = {h.name: h.tensor if h.compute is None else h.compute(h.tensor) for h in held}
    for name, tensor in before.items():
        assert torch.equal(published[name], tensor if "fc2" in name else tensor + 1)
        assert published[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_a_publisher_shows_zero_centred_norms_computed_and_sees_them_change() -> None:
    norm = parameter(torch.tensor([0.25, -0.5, 0.0]))
    chunk = Chunk({"decoder.final_layernorm.weight": norm}, layernorm_zero_centered_gamma=True)
    deadline = Deadline(30.0, "test")
    with Publisher([chunk], rank=0, world_size=1, trainer="megatron", trainer_options=OPTIONS) as publisher:
        client = Client(publisher.address)
        request = ExportRequest(transport="shm", dtypes={"decoder.final_layernorm.weight": "bfloat16"}, in_place=True)
        export = client.call("export", request, deadline=deadline, returns=Export)
        (shard,) = export.shards
        regions = [SourceRegion(shard.box, View(0, 0, shard.strides))]
        publisher.step_done(1)
        client.call("publish", PublishRequest(1, regions, 10.0), deadline=deadline, returns=Published)
        memory = shm.open_segment(export.segments[0])
        shown = memory.tensor[shard.byte_offset : shard.byte_offset + 6].view(torch.bfloat16).clone()
        memory.close()
        sealed = client.call("seal", SealRequest(1, regions), deadline=deadline, returns=Sealed)
        norm.data.add_(1)
        changed = client.call("seal", SealRequest(1, regions), deadline=deadline, returns=Sealed)
        client.close()

    assert shown.tolist() == [1.25, 0.5, 1.0]
    assert (sealed.changed, sealed.fingerprints) == ([], sealed.published)
    assert changed.changed == ["decoder.final_layernorm.weight"]


# ------------------------------------------------------------------------------------------------- refused by name


def test_a_tensor_without_a_rule_is_left_for_the_planner_to_refuse() -> None:
    tensors = {
        f"{LAYER}mixer.in_proj.weight": parameter(torch.ones(2, 2), 0),
        "decoder.final_norm.weight": parameter(torch.ones(2)),
    }

    _, sources = _sources([megatron.reader(Chunk(tensors), **OPTIONS)])

    assert sources.unmapped == [f"{LAYER}mixer.in_proj.weight"]
    assert list(sources.tensors) == ["model.norm.weight"]


def test_buffers_that_a_checkpoint_would_not_hold_are_not_read() -> None:
    chunk = Chunk({f"{LAYER}mlp.router.expert_bias": torch.ones(8)}, num_moe_experts=8)
    chunk.decoder.layers[0].mlp.router.register_buffer("local_tokens_per_expert", torch.ones(8), persistent=False)

    (held,) = megatron.reader(chunk, model_type="deepseek_v3", vocab_size=101).read()

    assert (held.name, held.is_buffer, held.dtype) == (f"{LAYER}mlp.router.expert_bias", True, "float32")


@pytest.mark.parametrize(
    ("name", "stride", "message"),
    [
        ("mlp.linear_fc2.weight", 2, "mlp.linear_fc2.weight has partition_stride 2"),
        ("mlp.linear_fc1.weight", 3, "mlp.linear_fc1.weight has partition_stride 3"),
    ],
)
def test_an_unknown_partition_is_refused(name: str, stride: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_one({LAYER + name: parameter(torch.ones(6, 4), 0, stride)})


def test_a_quantised_parameter_is_refused() -> None:
    class Float8Tensor(torch.Tensor):
        pass

    weight = torch.ones(4, 4).as_subclass(Float8Tensor)
    chunk = Chunk({f"{LAYER}mlp.linear_fc2.weight": nn.Buffer(weight)})

    with pytest.raises(ConfigError, match=r"mlp\.linear_fc2\.weight is a Float8Tensor"):
        megatron.reader(chunk, **OPTIONS).read()


@pytest.mark.parametrize("name", ["moe_mlp_glu_interleave_size", "attention_output_gate"])
def test_layouts_without_a_mapping_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=32"):
        megatron.reader(Chunk({}, **{name: 32}), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs trainer_options hf_config, or model_type and vocab_size"),
        ({"model_type": "gemma", "vocab_size": 101}, "no mapping for model_type 'gemma'; there are llama"),
        ({"vocab_sise": 101}, "unknown field `vocab_sise`"),
        ({**OPTIONS, "offloaded": "maybe"}, "offloaded is refuse, reload or pinned, not 'maybe'"),
        ({"hf_config": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron.reader(Chunk({}), **options)


def test_options_come_from_a_hugging_face_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 2}))
    chunk = Chunk({"output_layer.weight": parameter(torch.ones(4, 3), 0)})

    reader = megatron.reader(chunk, hf_config=str(tmp_path))

    assert [rule.target_shape for rule in reader.rules(reader.read())] == [(2, 3)]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Wrapper(nn.Linear(2, 2))])
def test_a_model_that_is_not_megatrons_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="holds no megatron-core model"):
        megatron.reader(model, **OPTIONS)


# -------------------------------------------------------------------------------------------------------- offloading


class OffloadedBuffer:
    """A parameter buffer as ``offload_to_cpu`` leaves it: memory freed, a copy on the host."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.param_data_cpu = weight.detach().clone().view(-1)
        self.param_data = weight.data.view(-1)
        self.param_to_bucket = {weight: None}
        self.param_index_map = {weight: (0, weight.numel(), 0)}
        self._nbytes = self.param_data.untyped_storage().nbytes()
        self.param_data.untyped_storage().resize_(0)

    def reload_from_cpu(self, move_params: bool, move_grads: bool) -> None:
        assert move_params
        assert not move_grads
        self.param_data.untyped_storage().resize_(self._nbytes)
        self.param_data.copy_(self.param_data_cpu)


def offloaded() -> tuple[nn.Module, torch.Tensor]:
    expected = torch.arange(6.0).view(2, 3)
    weight = parameter(expected.clone(), 1)
    wrapper = Wrapper(Chunk({f"{LAYER}mlp.linear_fc2.weight": weight}))
    wrapper.bucket_groups = wrapper.expert_parallel_bucket_groups = wrapper.expert_parallel_buffers = []
    wrapper.buffers = [OffloadedBuffer(weight)]
    wrapper.ddp_config = SimpleNamespace(overlap_param_gather=False)
    return wrapper, expected


def test_offloaded_parameters_are_refused_by_name() -> None:
    wrapper, _ = offloaded()
    reader = megatron.reader(wrapper, **OPTIONS)

    reader.settle()
    with pytest.raises(TransferError, match=r"mlp\.linear_fc2\.weight is offloaded: reload the parameters"):
        reader.read()


@pytest.mark.parametrize("how", ["reload", "pinned"])
def test_offloaded_parameters_come_back_or_are_read_from_the_host(how: str) -> None:
    wrapper, expected = offloaded()
    reader = megatron.reader(wrapper, **OPTIONS, offloaded=how)

    reader.settle()
    (held,) = reader.read()

    assert torch.equal(held.tensor, expected)
    buffer = wrapper.buffers[0]
    where = buffer.param_data if how == "reload" else buffer.param_data_cpu
    assert held.tensor.data_ptr() == where.data_ptr()


# ------------------------------------------------------------------------------------------------------------ glances


def test_a_glance_sees_what_a_reading_does_until_memory_is_another() -> None:
    chunk = Chunk({f"{LAYER}mlp.linear_fc1.weight": parameter(torch.ones(4, 3), 0)})
    reader = megatron.reader(chunk, **OPTIONS)
    assert reader.glance() is None
    held = reader.read()
    before, seen = reader.reading, reader.glance()
    assert seen is not None
    assert (seen.names, [t.data_ptr() for t in seen.tensors]) == ([held[0].name], [held[0].tensor.data_ptr()])
    assert seen.owners == [held[0].owner]
    reader.read()
    assert reader.reading == before

    (weight,) = chunk.parameters()
    weight.data = weight.data.clone()
    assert reader.glance() is None
    reader.read()
    assert reader.reading == before + 1
    assert reader.glance() is not None
    chunk.decoder.layers[0].mlp.linear_fc1.weight = parameter(torch.ones(4, 3), 0)
    assert reader.glance() is None


@pytest.mark.parametrize("how", ["refuse", "pinned"])
def test_there_is_no_glance_at_offloaded_parameters(how: str) -> None:
    wrapper, _ = offloaded()
    reader = megatron.reader(wrapper, **OPTIONS, offloaded=how)
    wrapper.buffers[0].reload_from_cpu(move_params=True, move_grads=False)
    reader.read()
    before = reader.reading
    assert reader.glance() is not None
    wrapper.buffers[0].param_data.untyped_storage().resize_(0)
    assert reader.glance() is None
    if how == "pinned":
        reader.read()
        assert reader.reading == before + 1
        assert reader.glance() is None
