"""Prove, on real SGLang model objects, that the traced needs say all that ``load_weights`` does.

    python -m tests.engine_side.replay FOLDER...      one line of JSON a model folder

Loads seeded random weights by the model's own loader and keeps every tensor's bytes; poisons everything; then makes the
recorded copies and fills, restores the constants, finalises, and compares bit for bit. Runs in an engine environment.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from tests.engine_side.models import build
from weightsync.boxes import whole
from weightsync.coverage import check_layout
from weightsync.layouts import layout_of
from weightsync.live import LiveWeights, bits
from weightsync.spec import Need, TensorSpec
from weightsync.trace import finalise, trace
from weightsync.views import box_of


def checkpoint(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of the folder's tensors."""
    from safetensors import safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                tensor = opened.get_tensor(name)
                found[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return found


def random_weights(tensors: list[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """Seeded float32 weights, none of them round numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=generator) for t in tensors}


def copies(live: LiveWeights, needs: list[Need], weights: dict[str, torch.Tensor]) -> None:
    """Make the recorded copies, with the plain cast that a publisher would make."""
    for need in needs:
        live.view(need.view, need.box.size).copy_(box_of(weights[need.tensor], need.box))


def replay(model: nn.Module, tensors: list[TensorSpec], seed: int = 1) -> dict:
    """Trace, load, poison, replay, compare. ``differs``: tensors that did not come out bit for bit."""
    live = LiveWeights(model)
    before = {s.name: bits(s.tensor()).clone() for s in live.slots}
    started = time.perf_counter()
    traced = trace(model, live, tensors)
    seconds = time.perf_counter() - started
    marked = live.moved() or [s.name for s in live.slots if not torch.equal(bits(s.tensor()), before[s.name])]
    layout = layout_of(live, traced, rank=0, device=torch.device("cpu"))
    live.keep(layout.constants)
    weights = random_weights(tensors, seed)
    model.load_weights((name, weights[name]) for name in weights)
    expected = {s.name: bits(s.tensor()).clone() for s in live.slots}
    live.poison(s.name for s in live.slots if s.name not in traced.opaque)
    live.restore()
    copies(live, traced.needs, weights)
    for fill in traced.fills:
        live.view(fill.view, fill.size).fill_(fill.value)
    finalise(model)
    return {
        "differs": [s.name for s in live.slots if not torch.equal(bits(s.tensor()), expected[s.name])],
        "marked": marked,
        "holes": [f"{h.param}: {h.reason}" for h in check_layout(layout, [], {})],
        "params": {p.name: p.kind for p in layout.params},
        "needs": len(traced.needs),
        "whole": sum(n.box == whole(weights[n.tensor].shape) for n in traced.needs),
        "fills": len(traced.fills),
        "opaque": traced.opaque,
        "derived": traced.derived,
        "constants": layout.constants,
        "ignored": traced.ignored,
        "trace_s": round(seconds, 4),
    }


def main(folders: list[str]) -> None:
    for folder in map(Path, folders):
        tensors = [TensorSpec(name, *known) for name, known in checkpoint(folder).items()]
        with torch.no_grad():
            result = replay(build(folder), tensors)
        print("RESULT " + json.dumps({"model": folder.name, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
