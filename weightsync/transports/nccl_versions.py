"""Which NCCL a process would use, and whether two fit: members of one communicator must have the same. Any process."""

from __future__ import annotations

import os

import torch

from weightsync.errors import ConfigError, TransferError

AGREED = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
"""Members of a group in which these differ wait for each other for ever."""


def settings() -> dict[str, str]:
    """What NCCL is told by environment variables here."""
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def group_version(device: torch.device) -> str:
    """What a group beside torch's is made with: ``gloo``, or ``NCCL 2.30.7``. Raises TransferError without CuPy."""
    if device.type == "cpu":
        return "gloo"
    try:
        from weightsync.transports import cupy_group
    except ImportError as e:
        raise TransferError(f"source: nccl needs CuPy (cupy-cuda13x) in this environment: {e}") from e
    return f"NCCL {cupy_group.version()}"


def nccl_version() -> str:
    """The NCCL that torch uses here, like ``2.30.7``; "" if this torch has none."""
    if not torch.version.cuda:
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def check_same_nccl(engine: str, ours: str, *, url: str, whose: str = "the actor's environment") -> None:
    """Raise ConfigError naming both versions if they differ: such members cannot be in one communicator."""
    if engine and ours and engine != ours:
        raise ConfigError(
            f"route nccl: this engine has NCCL {engine} and {whose} NCCL {ours}; members of one group "
            "must have the same. Use the actor's environment that fits the engine (its torch), or another route",
            engine=url,
        )
