"""Freshness and restraint of a Megatron publisher under the distributed optimizer. Runs in envs/megatron.

    python megatron_fresh.py

Four data-parallel ranks train one small model with ``overlap_param_gather``, so that a step leaves every rank with a
quarter of the new values. Ends in an error at the first thing that is not as it should be; prints one line a check.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import megatron_build as build
import megatron_parts
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_cases import Case, initialize, run_ranks

from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.publisher import ExportRequest, Publisher, PublishRequest, SealRequest
from weightsync.rpc import Client
from weightsync.spec import Export, Published, Sealed, Shard, SourceRegion, View
from weightsync.trainers import megatron
from weightsync.trainers.megatron_names import unwrap
from weightsync.transports import shm

EXPORT = ExportRequest(transport="shm", dtypes={}, in_place=False)
CASE = Case("qwen3", {"num_hidden_layers": 2})


def trainer():
    """A DistributedDataParallel chunk and its distributed optimizer. Gradients are made up: no forward is needed."""
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=40,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=6,
        ffn_hidden_size=72,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    (model,) = build.gpt(CASE, config, [], te_names=False)
    chunk = build.data_parallel(build.half(model), overlap=True)
    options = OptimizerConfig(
        optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True, overlap_param_gather=True, clip_grad=0.0
    )
    return chunk, get_megatron_optimizer(options, [chunk])


def step(chunk, optimizer, seed: int) -> None:
    """A training step up to where the next forward would gather: no rank holds all new values."""
    chunk.zero_grad_buffer()
    generator = torch.Generator().manual_seed(seed)
    for parameter in chunk.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    chunk.start_grad_sync()
    chunk.finish_grad_sync()
    assert optimizer.step()[0]


def everywhere_equal(chunk) -> bool:
    flat = torch.cat([p.detach().reshape(-1).float() for p in chunk.parameters()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return all(torch.equal(others[0], o) for o in others)


def rank_main(rank: int) -> None:
    megatron_parts.prepare()
    with megatron_parts.OnCpu():
        check(rank)


def check(rank: int) -> None:
    initialize(CASE)
    chunk, optimizer = trainer()
    reader = megatron.reader(chunk, model_type="qwen3", vocab_size=101)

    step(chunk, optimizer, 1)
    assert not everywhere_equal(chunk), "the test proves nothing unless the gather is pending here"
    reader.settle()
    assert everywhere_equal(chunk)
    say(rank, "a pending gather is finished")

    groups = chunk.bucket_groups
    assert all(not g.param_gather_dispatched and g.param_gather_handle is None for g in groups)
    step(chunk, optimizer, 2)
    assert not everywhere_equal(chunk)
    chunk.start_param_sync()
    reader.settle()
    assert everywhere_equal(chunk)
    assert all(g.param_gather_dispatched and g.param_gather_handle is None for g in groups)
    say(rank, "a gather under way is waited for, and not done twice")

    backward_then_settle_then_step(chunk, optimizer, reader)
    say(rank, "settling between backward and step does not cost the step its gather")

    with Publisher(
        chunk,
        rank=rank,
        world_size=dist.get_world_size(),
        trainer="megatron",
        trainer_options={"model_type": "qwen3", "vocab_size": 101},
    ) as publisher:
        ten_publishes_two_of_them_failed(chunk, optimizer, publisher)
        say(rank, "ten publishes carry their step's values and leave every tensor as it was")
        swapped_weights(chunk, publisher)
        say(rank, "weights that are swapped in are refused by name")


def ten_publishes_two_of_them_failed(chunk, optimizer, publisher) -> None:
    client = Client(publisher.address, what="publisher")
    export = client.call("export", EXPORT, deadline=Deadline(60.0, "export"), returns=Export)
    arena = shm.open_segment(export.segments[0])
    regions = [SourceRegion(s.box, View(i, 0, s.strides)) for i, s in enumerate(export.shards)]
    for number in range(10):
        if number in (3, 7):
            before = hashes(chunk)
            refused(client, number + 1 if number == 3 else number - 2, regions)
            assert hashes(chunk) == before
            continue
        step(chunk, optimizer, 10 + number)
        publisher.step_done(number)
        assert everywhere_equal(chunk)
        before = hashes(chunk)
        publish(client, number, regions)
        sealed = client.call("seal", SealRequest(number, regions), deadline=Deadline(60.0, "seal"), returns=Sealed)
        assert (sealed.changed, sealed.fingerprints) == ([], sealed.published)
        assert hashes(chunk) == before
        assert_published(chunk, arena.tensor, export.shards)
    arena.close()
    client.close()


def assert_published(chunk, memory: torch.Tensor, shards: list[Shard]) -> None:
    own = dict(unwrap(chunk).named_parameters())
    assert {s.tensor for s in shards} == set(own)
    for shard in shards:
        dtype = getattr(torch, shard.dtype)
        nbytes = own[shard.tensor].numel() * dtype.itemsize
        there = memory[shard.byte_offset : shard.byte_offset + nbytes].view(dtype)
        assert torch.equal(there, own[shard.tensor].detach().reshape(-1)), shard.tensor


def refused(client, number: int, regions: list[SourceRegion]) -> None:
    error = None
    try:
        publish(client, number, regions, timeout_s=0.2)
    except TransferError as e:
        error = e
    assert "training rank" in str(error), f"step {number}: {error}"


def swapped_weights(chunk, publisher) -> None:
    client = Client(publisher.address, what="publisher")
    export = client.call("export", EXPORT, deadline=Deadline(60.0, "export"), returns=Export)
    regions = [SourceRegion(s.box, View(i, 0, s.strides)) for i, s in enumerate(export.shards)]
    model = unwrap(chunk)
    reference = {name: parameter.detach() + 1 for name, parameter in model.named_parameters()}

    publisher.step_done(100)
    model.load_state_dict(reference, strict=False)
    refused(client, 100, regions)

    for group in chunk.buffers:
        publisher.step_done(101)
        kept = group.param_data.clone()
        group.param_data.add_(1)  # past the version counters of all parameters
        refused(client, 101, regions)
        group.param_data.copy_(kept)

    publisher.step_done(101)
    publish(client, 101, regions)
    model.decoder.final_layernorm.weight.data.add_(1)  # past the version counters, as optimizers do
    sealed = client.call("seal", SealRequest(101, regions), deadline=Deadline(60.0, "seal"), returns=Sealed)
    assert sealed.changed == ["decoder.final_layernorm.weight"], sealed.changed
    client.close()


def publish(client, number: int, regions: list[SourceRegion], timeout_s: float = 60.0) -> Published:
    request = PublishRequest(step=number, regions=regions, timeout_s=timeout_s)
    return client.call("publish", request, deadline=Deadline(120.0, "publish"), returns=Published)


def hashes(chunk) -> list[str]:
    tensors = [*unwrap(chunk).parameters(), *unwrap(chunk).buffers()]
    return [hashlib.sha256(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for t in tensors]


def backward_then_settle_then_step(chunk, optimizer, reader) -> None:
    chunk.zero_grad_buffer()
    for parameter in chunk.parameters():
        parameter.main_grad.fill_(1.0)
    chunk.start_grad_sync()
    chunk.finish_grad_sync()
    reader.settle()
    assert optimizer.step()[0]
    assert not everywhere_equal(chunk)
    for module in unwrap(chunk).modules():  # what the next forward's hooks do
        for parameter in module.parameters(recurse=False):
            chunk.param_to_bucket_group[parameter].finish_param_sync()
    assert everywhere_equal(chunk)


def say(rank: int, what: str) -> None:
    if rank == 0:
        print(what, flush=True)


if __name__ == "__main__":
    run_ranks(rank_main)
