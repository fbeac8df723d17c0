"""The nouns: frozen, slotted, without behaviour. Every process reads this file, so it imports neither torch nor ray.

Two coordinate systems meet here. A *tensor* is what Hugging Face names (``model.layers.0.mlp.up_proj.weight``); its
boxes are in elements of the full, unsharded tensor. A *view* says where a box lies in one flat storage: an element
offset and one element stride a dim. A copy is one box with two views of it.
"""

from __future__ import annotations

import msgspec


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of all nouns: immutable, slotted, comparable, hashable where its fields are.

    None can be part of a cycle, so the collector does not look at them: a plan has tens of thousands, and an engine's
    heap takes it long to walk.
    """


# ---------------------------------------------------------------------------------------------------- geometry


class Box(Struct, array_like=True):
    """An axis-aligned region: per dim an offset and a size, in elements. A 0-d box has no dims and one element."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


class View(Struct, array_like=True):
    """Where a box lies in a flat storage.

    ``storage`` is an index: of a shard in its rank's list (sources) or of a parameter in its engine rank's list
    (targets). ``offset`` is in elements from the start of that storage, ``strides`` in elements, one a dim of the box.
    """

    storage: int
    offset: int
    strides: tuple[int, ...]


class TensorSpec(Struct, array_like=True):
    """A full tensor by its Hugging Face name. ``dtype`` is torch's name without the prefix: ``bfloat16``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


# ------------------------------------------------------------------------------------------------- trainer side


class Shard(Struct, array_like=True):
    """What one training rank holds of one trainer tensor.

    ``shape`` is the global shape in the trainer's own layout, ``box`` the part held (a size of 0 somewhere: nothing).
    ``strides`` are those of the memory that is published, in elements. ``segment`` and ``byte_offset`` say where that
    memory lies once exported; before that, ``segment`` is -1.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    strides: tuple[int, ...]
    segment: int = -1
    byte_offset: int = 0
    is_buffer: bool = False


class Rule(Struct, array_like=True):
    """One step of a mapping: a box of a trainer tensor is a box of a Hugging Face tensor, its dims perhaps reordered.

    ``dims[d]`` names the trainer dim that becomes target dim ``d``; None makes a unit dim. Trainer dims that no entry
    names must have size 1 in ``box``. Moves elements, never computes.
    """

    source: str
    box: Box
    target: str
    target_shape: tuple[int, ...]
    target_offset: tuple[int, ...]
    dims: tuple[int | None, ...]


class Segment(Struct):
    """One mappable piece of a publisher's memory.

    ``transport`` says who can open it (``shm``, ``cuda_ipc``), ``handle`` is what that transport needs, ``device`` the
    GPU's UUID (empty: host memory). Two segments with equal handles are the same memory.
    """

    transport: str
    handle: bytes
    nbytes: int
    device: str = ""


class Description(Struct):
    """A publisher's answer to ``describe``: who it is and what it holds, before any memory is exported."""

    rank: int
    world_size: int
    trainer: str
    host: str
    pid: int
    boot_id: str
    versions: dict[str, str]
    devices: list[str]
    shards: list[Shard]
    rules: list[Rule]
    step: int | None = None


class Export(Struct):
    """A publisher's answer to ``export``: the same shards with a place; ``notes`` say why an arena was needed.

    ``rounds``: by shard, when it lies there, if the arena is filled part by part (see ``weightsync.rounds``); empty:
    all at once. Rounds below ``num_parts`` are filled by ``publish``.
    """

    segments: list[Segment]
    shards: list[Shard]
    generation: int
    arena_bytes: int
    notes: list[str] = []
    rounds: list[int] = []
    num_parts: int = 1


class SourceRegion(Struct, array_like=True):
    """A box that a rank fingerprints: ``view.storage`` is a shard index; ``box`` is in the Hugging Face tensor."""

    box: Box
    view: View


class Published(Struct):
    """A publisher's answer to ``publish``: the step's bytes lie readable. Their fingerprints come with the seal."""

    step: int
    generation: int
    seconds: float


class Sealed(Struct):
    """A publisher's answer to ``seal``, after the move: fingerprints of the sources now, one a region asked for.

    ``published`` are those of what was published. ``changed`` names tensors that were written to or moved since, or
    whose two fingerprints differ.
    """

    fingerprints: list[int]
    published: list[int]
    changed: list[str]
    seconds: float


# -------------------------------------------------------------------------------------------------- engine side


class Param(Struct, array_like=True):
    """A tensor that an engine rank serves from. ``kind``: parameter, buffer or derived (recomputed after loading)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    kind: str = "parameter"


class Need(Struct, array_like=True):
    """A box of a Hugging Face tensor that an engine rank wants; ``view.storage`` indexes the rank's ``params``."""

    tensor: str
    box: Box
    view: View


class Fill(Struct, array_like=True):
    """A region that the loader fills with one value (vocabulary padding), in the parameter's own dims."""

    view: View
    size: tuple[int, ...]
    value: float


class Layout(Struct):
    """What one engine rank needs, as traced from its own ``load_weights``.

    ``opaque`` maps a parameter's name to why the trace could not follow it; ``ignored`` lists tensors offered that the
    loader did nothing with; ``constants`` names params that no push writes (rotary caches), ``derived`` those that
    ``post_load_weights`` computes. ``device`` is the rank's GPU and ``visible`` all that its process sees, by UUID.
    ``versions``: of libraries, and what its environment says of NCCL.
    """

    rank: int
    boot_id: str
    device: str
    host: str
    params: list[Param]
    needs: list[Need]
    fills: list[Fill]
    constants: list[str]
    derived: list[str]
    opaque: dict[str, str]
    ignored: list[str]
    versions: dict[str, str]
    visible: list[str] = []


# -------------------------------------------------------------------------------------------------------- plan


class Copy(Struct, array_like=True):
    """One box of a tensor from a shard of trainer rank ``rank`` (``source``) to an engine rank's param (``target``)."""

    tensor: str
    box: Box
    rank: int
    source: View
    target: View


class RankPlan(Struct):
    """Everything one engine rank does at a push: the copies, and the boxes by which it is verified (its needs)."""

    engine: str
    rank: int
    copies: list[Copy]
    needs: list[Need]
    fills: list[Fill]


class Traffic(Struct):
    """One row of a plan's summary: bytes that an engine rank reads from one trainer rank by one route."""

    engine: str
    engine_rank: int
    trainer_rank: int
    route: str
    num_bytes: int
    num_copies: int
    same_device: bool
