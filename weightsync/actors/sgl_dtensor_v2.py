"""The actor between DTensor trainers (FSDP2, HSDP, TP with FSDP) and SGLang. Runs in envs/sgl_dtensor_v2."""

from __future__ import annotations

from typing import ClassVar

from weightsync.actors.base import WeightSyncActor


class SglDTensorV2WeightSync(WeightSyncActor):
    """Weight sync from publishers made with ``trainer="dtensor_v2"`` into SGLang engines."""

    pair: ClassVar[str] = "sgl_dtensor_v2"
    trainer: ClassVar[str] = "dtensor_v2"
