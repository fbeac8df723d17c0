"""Reads a Megatron-core trainer: its model chunks as shards, and rules onto Hugging Face names. In training workers.

    Publisher(chunks, rank=rank, world_size=world_size, trainer="megatron", trainer_options={"hf_config": folder})

``chunks`` is what the training loop drives: one model, or the list of a rank's virtual pipeline stages, wrapped or not.
The options are those of ``Options``.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.spec import Rule
from weightsync.trainers import Held, Seen
from weightsync.trainers.megatron_mapping import FAMILIES, Model, is_norm, rules_for
from weightsync.trainers.megatron_names import NamedLocal, Slot, hugging_face_layers, slots, unique_layers, unwrap
from weightsync.trainers.megatron_params import Gathers, Samples, host_copies
from weightsync.trainers.megatron_shards import Axis, Place, place_of, view_of


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a Megatron model does not say of itself.

    ``hf_config``: the Hugging Face model's folder, its config.json or that file's content; it gives the other two,
    which may also be given: ``model_type`` decides the names of experts, ``vocab_size`` is the true one, without
    padding. ``offloaded``: what happens while parameters are offloaded to pinned host memory: ``refuse`` to publish,
    ``reload`` them in ``step_done`` and leave them on the GPU, or publish the ``pinned`` copy.
    """

    hf_config: str | dict[str, Any] = ""
    model_type: str = ""
    vocab_size: int = 0
    offloaded: str = "refuse"


def reader(model: nn.Module | Sequence[nn.Module], **options: Any) -> MegatronReader:
    """The reader of a rank's model chunks. Raises ConfigError on an option or a model that it cannot work with."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise ConfigError("trainer megatron reads a model or a list of model chunks")
    return MegatronReader(chunks, _options(options))


class MegatronReader:
    """The ``Reader`` of one rank. ``chunks`` are the wrapped ones: they know of pending all-gathers.

    Modules are found once, here; the parameters in them are looked up at every read. Between reads nothing here keeps
    their memory alive.
    """

    def __init__(self, chunks: Sequence[nn.Module], options: Options) -> None:
        self.reading = 0
        self._wrapped = list(chunks)
        self._chunks = [unwrap(chunk) for chunk in chunks]
        self._options = options
        unique_layers(self._chunks)
        config = self._chunks[0].config
        _check_config(config)
        self._zero_centred = bool(config.layernorm_zero_centered_gamma)
        self._gated = bool(config.gated_linear_unit)
        self._model = _model(self._chunks[0], options)
        self._gathers = Gathers(self._wrapped)
        self._axes: dict[str, tuple[Axis, Axis]] = {}
        self._slots = list(self._find_slots())
        self._known: dict[str, _Known] = {}
        self._names = [slot.name for slot in self._slots]
        self._places: list[tuple] = []  # what the last read found, and where
        self._offloaded = False  # whether some of that was a copy on the host
        self._samples: Samples | None = None

    def settle(self) -> None:
        """Finish parameter all-gathers that would overlap with the next forward; reload what is offloaded, if so asked.

        A collective of the data-parallel group: every rank calls it, in the training thread.
        """
        if self._options.offloaded == "reload":
            self._gathers.reload()
        self._gathers.finish()
        self._samples = Samples(self._wrapped)

    def swapped(self) -> list[str]:
        """Names of some parameters that held other values when settled. Sees only those in the optimizer's buffers."""
        different = {id(p) for p in self._samples.different()} if self._samples is not None else set()
        return [slot.name for slot in self._slots if id(slot.now().tensor) in different] if different else []

    def read(self) -> list[Held]:
        """Every parameter and persistent buffer, by global name, in the trainer's own memory.

        For norms that Megatron keeps zero-centred, what engines get is computed.
        """
        data = host_copies(self._wrapped, self._options.offloaded)
        held = [self._held(slot.now(), data) for slot in self._slots]
        places = [(*_place(slot.tensor()), h.tensor.data_ptr()) for slot, h in zip(self._slots, held, strict=True)]
        if places != self._places:
            self.reading += 1
            self._places = places
            self._offloaded = any(place[1] != place[-1] for place in places)
        return held

    def glance(self) -> Seen | None:
        """None also while parameters are offloaded: where their copies lie only ``read`` finds out."""
        if self._offloaded:
            return None
        tensors = [slot.tensor() for slot in self._slots]
        same = [(*place, place[1]) for place in map(_place, tensors)] == self._places
        return Seen(self._names, tensors, [*tensors]) if same else None

    def rules(self, held: list[Held]) -> list[Rule]:
        """The rules of what this rank holds; a tensor that no family has gets none, and is refused at connect."""
        return [rule for h in held for rule in rules_for(h.name, h.shape, self._model)]

    def _find_slots(self) -> Iterator[Slot]:
        for chunk in self._chunks:
            groups = chunk.pg_collection
            axes = _axis(groups.tp), _axis(getattr(groups, "expt_tp", None))
            first_expert = _axis(getattr(groups, "ep", None)).rank * _local_experts(chunk)
            for slot in slots(chunk, first_expert):
                if slot.name not in self._axes:  # a last stage may have the embedding and its copy
                    self._axes[slot.name] = axes
                    yield slot

    def _held(self, named: NamedLocal, data: Callable[[NamedLocal], torch.Tensor]) -> Held:
        known = self._known.get(named.name)
        if known is None or not known.is_of(named.tensor):
            tensor_axis, expert_axis = self._axes[named.name]
            place = place_of(named, tensor_axis=tensor_axis, expert_axis=expert_axis, gated=self._gated)
            known = self._known[named.name] = _Known(weakref.ref(named.tensor), named.tensor.shape, place)
        return Held(
            named.name,
            view_of(data(named), known.place),
            known.place.shape,
            known.place.offset,
            named.is_buffer,
            owner=named.tensor,
            compute=_plus_one if self._zero_centred and is_norm(named.name) else None,
        )


class _Known(NamedTuple):
    """What was found out about a tensor; valid while the slot holds the same object of the same shape."""

    tensor: weakref.ref[torch.Tensor]
    shape: torch.Size
    place: Place

    def is_of(self, tensor: torch.Tensor) -> bool:
        return self.shape == tensor.shape and self.tensor() is tensor


def _place(tensor: torch.Tensor) -> tuple:
    return id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _plus_one(norm: torch.Tensor) -> torch.Tensor:
    """What a norm that the trainer keeps zero-centred multiplies with."""
    return norm + 1


def _axis(group: Any) -> Axis:
    return Axis(0, 1) if group is None else Axis(group.rank(), group.size())


def _local_experts(chunk: nn.Module) -> int:
    experts = chunk.config.num_moe_experts
    return 0 if experts is None else experts // chunk.pg_collection.ep.size()


def _options(given: Mapping[str, Any]) -> Options:
    try:
        options = msgspec.convert(dict(given), Options)
    except msgspec.ValidationError as e:
        raise ConfigError(f"trainer_options of megatron: {e}") from e
    if options.offloaded not in ("refuse", "reload", "pinned"):
        raise ConfigError(f"offloaded is refuse, reload or pinned, not {options.offloaded!r}")
    return options


def _check_config(config: Any) -> None:
    """Refuse by name what lays parameters out in another way."""
    for name in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size", "attention_output_gate"):
        if getattr(config, name, None):
            raise ConfigError(f"{name}={getattr(config, name)} lays out weights in a way that has no mapping")


def _model(chunk: nn.Module, options: Options) -> Model:
    config = chunk.config
    hf = _hf_config(options.hf_config)
    model_type = options.model_type or hf.get("model_type", "")
    vocab_size = options.vocab_size or hf.get("vocab_size", 0)
    if not model_type or not vocab_size:
        raise ConfigError("trainer megatron needs trainer_options hf_config, or model_type and vocab_size")
    if model_type not in FAMILIES:
        raise ConfigError(f"no mapping for model_type {model_type!r}; there are {', '.join(FAMILIES)}")
    hf_layers = hugging_face_layers(chunk)
    return Model(
        model_type=model_type,
        vocab_size=vocab_size,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        latent_attention=bool(getattr(config, "multi_latent_attention", False)),
        q_lora_rank=getattr(config, "q_lora_rank", None) or 0,
        layers=hf_layers if hf_layers is not None else {i: i for i in range(config.num_layers)},
    )


def _hf_config(source: str | dict[str, Any]) -> dict[str, Any]:
    if not source or isinstance(source, dict):
        return source or {}
    path = Path(source)
    try:
        return json.loads((path / "config.json" if path.is_dir() else path).read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"hf_config: cannot read {path}: {e}") from e
