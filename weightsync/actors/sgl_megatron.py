"""The actor between Megatron-core trainers and SGLang. Runs in envs/sgl_megatron."""

from __future__ import annotations

from typing import ClassVar

from weightsync.actors.base import WeightSyncActor


class SglMegatronWeightSync(WeightSyncActor):
    """Weight sync from publishers made with ``trainer="megatron"`` into SGLang engines."""

    pair: ClassVar[str] = "sgl_megatron"
    trainer: ClassVar[str] = "megatron"
