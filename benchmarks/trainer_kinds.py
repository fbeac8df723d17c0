"""The trainers that a benchmark can push from, alike in what its ranks do with them. Runs in a training rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import models, trainer_build
from benchmarks.rank_wire import RankSpec

MEGATRON = "megatron"


class Trainer(NamedTuple):
    """One rank's model, and what is particular to its kind.

    ``reader`` and ``options`` are the Publisher's ``trainer`` and ``trainer_options``; ``title`` goes into rows.
    ``whole_tensors(dtype)`` yields whole Hugging Face tensors by name, a collective over all ranks.
    """

    module: nn.Module
    reader: str
    options: dict[str, Any]
    title: str
    whole_tensors: Callable[[torch.dtype], Iterator[tuple[str, torch.Tensor]]]


def make(spec: RankSpec, device: torch.device) -> Trainer:
    """Build what ``spec`` says on ``device``. A collective over all ranks."""
    return _megatron(spec, device) if spec.kind == MEGATRON else _fsdp(spec, device)


def _fsdp(spec: RankSpec, device: torch.device) -> Trainer:
    module = trainer_build.build(
        models.model(spec.model),
        kind=spec.kind,
        stacked=spec.stacked,
        dtype=getattr(torch, spec.dtype),
        device=device,
        ranks=spec.ranks,
    )
    kind = "nemo-automodel FSDP2" if spec.kind == "automodel" else "FSDP2"
    stacked = ", stacked experts" if spec.stacked else ""
    title = f"{kind} over {spec.ranks}, {spec.dtype}{stacked}"
    return Trainer(module, "dtensor_v2", {}, title, lambda dtype: trainer_build.full_tensors(module, dtype))


def _megatron(spec: RankSpec, device: torch.device) -> Trainer:
    from benchmarks import megatron_build

    shape = models.model(spec.model)
    module = megatron_build.build(shape, parallel=spec.parallel, dtype=getattr(torch, spec.dtype), device=device)
    whole_tensors = megatron_build.WholeTensors(module, shape)
    axes = f" {spec.parallel}" if str(spec.parallel) else ""
    title = f"Megatron{axes} over {spec.ranks}, {spec.dtype}"
    return Trainer(module, MEGATRON, megatron_build.options_of(shape), title, whole_tensors)
