"""Megatron parameters offloaded from a GPU come back or are pushed from pinned memory, as configured.

Needs megatron-core and transformers: in this interpreter, or in the environments under ``envs/``.
"""

from __future__ import annotations

import pytest
import torch

from tests import megatron_offload
from weightsync.transports import cuda_ipc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("how", ["reload", "pinned"])
def test_offloaded_parameters_come_back_or_are_pushed_from_pinned_memory(how: str) -> None:
    megatron_offload.check(how, device="cuda:0", bound=1e-3)


def test_offloaded_parameters_are_refused_unless_something_is_said() -> None:
    megatron_offload.check_refusal("cuda:0")


@pytest.mark.parametrize("pinned", [True, False])
def test_host_memory_is_copied_into_an_arena_beside_what_is_on_the_gpu(pinned: bool) -> None:
    host = [torch.randn(300, 70), torch.randn(64, 33).t(), torch.randn(5).to(torch.bfloat16)]
    sources = [t.pin_memory() if pinned else t for t in host] + [torch.randn(1 << 20, device="cuda")]
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    targets = [torch.empty(s.shape, dtype=d, device="cuda") for s, d in zip(sources, dtypes, strict=True)]
    puller = cuda_ipc.make_puller(list(zip(targets, sources, strict=True)))
    puller.run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target.cpu(), source.cpu().to(target.dtype))
    sources[0].mul_(2)
    puller.run()
    assert torch.equal(targets[0].cpu(), sources[0])
