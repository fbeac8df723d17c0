"""Megatron-core's model chunks, unwrapped, and the global names of what they hold. Runs in a training worker.

A chunk numbers its layers and its experts from 0; a global name counts them over pipeline stages (virtual ones too) and
over expert-parallel ranks. The copy of the embedding that a last stage keeps for its output layer gets the embedding's
name: it is the same data, and a replica to the planner.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from weightsync.errors import ConfigError

EMBEDDING = "embedding.word_embeddings.weight"
_ATTENTION, _FEED_FORWARD = "*+D", "-E"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)")


class NamedLocal(NamedTuple):
    """A tensor of this rank by its global name."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool


class Slot(NamedTuple):
    """Where a module keeps a tensor, under its global name. What is in it may be replaced at any time."""

    name: str
    module: torch.nn.Module
    attribute: str
    is_buffer: bool

    def now(self) -> NamedLocal:
        return NamedLocal(self.name, self.tensor(), self.is_buffer)

    def tensor(self) -> torch.Tensor:
        kept = self.module._buffers if self.is_buffer else self.module._parameters
        tensor = kept[self.attribute]
        assert isinstance(tensor, torch.Tensor), f"{self.name} was taken out of the model"
        return tensor


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel or HybridModel inside DistributedDataParallel, Float16Module and the like.

    Raises ConfigError if there is none.
    """
    module = chunk
    while not hasattr(module, "decoder"):
        if not isinstance(getattr(module, "module", None), torch.nn.Module):
            raise ConfigError(f"{type(chunk).__name__} holds no megatron-core model: nothing in it has a decoder")
        module = module.module
    return module


def slots(model: torch.nn.Module, first_expert: int) -> Iterator[Slot]:
    """Of an unwrapped chunk's parameters and persistent buffers, each tensor once.

    ``first_expert`` is the global id of its expert 0. Modules are not asked for their ``state_dict``: routers change
    the dtype of their bias when they are.
    """
    layers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    seen = set()
    for path, module in model.named_modules():
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for attribute, tensor in [*module._parameters.items(), *persistent.items()]:
            if tensor is None or tensor in seen:
                continue
            seen.add(tensor)
            name = f"{path}.{attribute}" if path else attribute
            if tied and name == "output_layer.weight":
                name = EMBEDDING
            else:
                name = _global_name(name, layers, first_expert)
            yield Slot(name, module, attribute, attribute in persistent)


def hugging_face_layers(model: torch.nn.Module) -> dict[int, int] | None:
    """By Megatron layer number (global, from 0), the transformer layer that it is part of; None: the same number.

    A HybridModel has attention and feed-forward as layers of their own; an attention and the feed-forward behind it are
    one layer of Hugging Face's. What else its pattern holds is in no layer of theirs, so it has no entry.
    """
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern is None:
        return None
    symbols = pattern.partition("/")[0].replace("|", "")
    layers, attentions = {}, 0
    for number, symbol in enumerate(symbols):
        if symbol in _ATTENTION:
            layers[number] = attentions
            attentions += 1
        elif symbol in _FEED_FORWARD:
            if number == 0 or symbols[number - 1] not in _ATTENTION:
                raise ConfigError(
                    f"hybrid_layer_pattern {pattern!r}: feed-forward layer {number} does not follow an attention "
                    "layer, as it does in every model that the mapping knows"
                )
            layers[number] = attentions - 1
    return layers


def unique_layers(chunks: Iterable[torch.nn.Module]) -> None:
    """Raise ConfigError if two chunks hold the same layer: virtual stages that were built without ``vp_stage``."""
    numbers = [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    if twice:
        raise ConfigError(f"model chunks hold layers {twice} twice; build each chunk with its vp_stage")


def _global_name(name: str, layers: dict[int, int], first_expert: int) -> str:
    name = _LAYER.sub(lambda m: f"decoder.layers.{layers[int(m[1])]}.", name)
    return _EXPERT.sub(lambda m: f"{m[1]}{first_expert + int(m[2])}", name)
