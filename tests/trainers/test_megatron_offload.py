"""Real Megatron parameter buffers that were offloaded, pushed as configured, on a CPU."""

from __future__ import annotations

import pytest

from tests import megatron_offload

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("how", ["reload", "pinned"])
def test_offloaded_parameters_come_back_or_are_pushed_from_the_host(how: str) -> None:
    megatron_offload.check(how, device="cpu", bound=1e-4)


def test_offloaded_parameters_are_refused_unless_something_is_said() -> None:
    megatron_offload.check_refusal("cpu")
