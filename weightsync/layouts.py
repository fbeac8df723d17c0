"""An engine rank's layout, as its receiver tells it to the actor: what it serves from, and what it needs for that."""

from __future__ import annotations

import socket

import torch

from weightsync.devices import uuid_of, visible_uuids
from weightsync.live import LiveWeights
from weightsync.receiver_wire import BOOT_ID
from weightsync.spec import Layout, Param
from weightsync.trace import Trace
from weightsync.transports.nccl_versions import AGREED, settings
from weightsync.versions import library_versions


def constants_of(live: LiveWeights, traced: Trace) -> list[str]:
    """The buffers and plain tensors that loading writes in no way: no push changes them."""
    return [slot.name for slot in live.slots if slot.kind != "parameter" and slot.name not in traced.written]


def layout_of(live: LiveWeights, traced: Trace, *, rank: int, device: torch.device) -> Layout:
    """The layout of TP rank ``rank``, whose weights lie on ``device``. Positions in it are those of ``live.slots``."""
    params = []
    for slot in live.slots:
        tensor = slot.tensor()
        kind = "derived" if slot.name in traced.derived else "parameter" if slot.kind == "parameter" else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        params.append(Param(slot.name, tuple(tensor.shape), dtype, tensor.numel(), kind))
    return Layout(
        rank=rank,
        boot_id=BOOT_ID,
        device=uuid_of(device) if device.type == "cuda" else "",
        host=socket.gethostname(),
        params=params,
        needs=traced.needs,
        fills=traced.fills,
        constants=constants_of(live, traced),
        derived=traced.derived,
        opaque=traced.opaque,
        ignored=traced.ignored,
        versions=library_versions() | {name: value for name, value in settings().items() if name in AGREED},
        visible=visible_uuids() if device.type == "cuda" else [],
    )
