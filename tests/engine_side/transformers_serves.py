"""transformers' model behind a fake engine's HTTP, with our receiver in it: what a push fills can be asked for logits.

    python -m tests.engine_side.transformers_serves FOLDER DEVICE DTYPE

Prints a line of JSON (its URL), then one for each line that it reads: ``[method, argument...]``. Parameters are NaN
until a push has written them. Runs where transformers is installed.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterable

import torch
from torch import nn

from tests.fakes.engine import FakeEngine

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Checkpoint tensors into the model, as SGLang's models take them; experts may be stacked in it."""
    own = dict(model.named_parameters())
    for name, tensor in weights:
        target = own[name].data if name in own else _expert(own, name)
        target.copy_(tensor)


def _expert(own: dict[str, nn.Parameter], name: str) -> torch.Tensor:
    match = _EXPERT.fullmatch(name)
    assert match is not None, f"{name} has no place in the model"
    experts, number, kind = match[1], int(match[2]), match[3]
    if kind == "down":
        return own[f"{experts}.down_proj"].data[number]
    gate, up = own[f"{experts}.gate_up_proj"].data[number].chunk(2)
    return gate if kind == "gate" else up


class Served:
    """The commands."""

    def __init__(self, folder: str, device: str, dtype: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
        )
        self._model = model.to(device).eval()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(float("nan"))
        self._model.load_weights = types.MethodType(load_weights, self._model)
        self._device = device
        kind = torch.device(device).type
        self.engine = FakeEngine(models=[self._model], receiver=True, info={"device": kind})

    def logits(self, tokens: list[int]) -> list[list[float]]:
        with torch.no_grad():
            return self._model(torch.tensor([tokens], device=self._device)).logits[0].float().tolist()

    def version(self) -> str:
        return self.engine.weight_version


def main() -> None:
    served = Served(*sys.argv[1:])
    print(json.dumps(served.engine.url), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(served, method)(*arguments)), flush=True)
    served.engine.close()


if __name__ == "__main__":
    main()
