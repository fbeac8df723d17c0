"""DTensor trainers' tensors as boxes of Hugging Face's. Pure: names and shapes in, rules out.

Tensors that go by their Hugging Face name and layout map to themselves. nemo-automodel stacks a layer's experts:

    *.experts.gate_and_up_projs   [E, H, 2 I]   gate, then up, side by side; [E, H, I] is up alone (no gate)
    *.experts.down_projs          [E, I, H]

where Hugging Face has ``experts.{e}.gate_proj.weight`` and ``up_proj`` [I, H] and ``down_proj`` [H, I]. Any other stack
of experts is refused by name: gate and up may be interleaved, and their order cannot be seen.
"""

from __future__ import annotations

from weightsync.errors import ConfigError
from weightsync.spec import Box, Rule

Shape = tuple[int, ...]

_GATE_UP, _DOWN = "gate_and_up_projs", "down_projs"


def rules_of(shapes: dict[str, Shape]) -> list[Rule]:
    """The rules for tensors of these names and whole shapes. Raises ConfigError naming one that cannot be mapped."""
    rules: list[Rule] = []
    for name, shape in shapes.items():
        experts, _, leaf = name.rpartition(".")
        if not _is_stack(name, shape):
            rules.append(_identity(name, shape))
        elif leaf == _GATE_UP:
            rules += _gate_up(experts, shape, shapes.get(f"{experts}.{_DOWN}"))
        elif leaf == _DOWN and len(shape) == 3:
            rules += _down(experts, shape)
        else:
            raise _unknown(name, shape)
    return rules


def _is_stack(name: str, shape: Shape) -> bool:
    """Whether all experts of a layer lie in one tensor: it belongs to ``experts`` itself, not to ``experts.3``."""
    *parents, leaf = name.split(".")
    return bool(parents) and parents[-1] == "experts" and (len(shape) > 1 or "proj" in leaf)


def _identity(name: str, shape: Shape) -> Rule:
    start = (0,) * len(shape)
    return Rule(name, Box(start, shape), name, shape, start, tuple(range(len(shape))))


def _gate_up(experts: str, shape: Shape, down: Shape | None) -> list[Rule]:
    name = f"{experts}.{_GATE_UP}"
    if down is None or len(shape) != 3 or len(down) != 3 or (shape[0], shape[1]) != (down[0], down[2]):
        raise _unknown(name, shape, f"; {experts}.{_DOWN} is {list(down) if down else 'not there'}")
    hidden, inner = shape[1], down[1]
    parts = {2 * inner: ("gate_proj", "up_proj"), inner: ("up_proj",)}.get(shape[2])
    if parts is None:
        raise _unknown(name, shape, f"; {experts}.{_DOWN} is {list(down)}")
    return [
        _transposed(name, (expert, 0, inner * place), (hidden, inner), f"{experts}.{expert}.{part}.weight")
        for expert in range(shape[0])
        for place, part in enumerate(parts)
    ]


def _down(experts: str, shape: Shape) -> list[Rule]:
    return [
        _transposed(f"{experts}.{_DOWN}", (e, 0, 0), shape[1:], f"{experts}.{e}.down_proj.weight")
        for e in range(shape[0])
    ]


def _transposed(source: str, offset: Shape, size: Shape, target: str) -> Rule:
    """One expert's matrix of ``size``, which lies in ``source`` at ``offset``, as the transposed ``target``."""
    return Rule(source, Box(offset, (1, *size)), target, (size[1], size[0]), (0, 0), (2, 1))


def _unknown(name: str, shape: Shape, more: str = "") -> ConfigError:
    return ConfigError(
        f"{name} {list(shape)} stacks experts in a layout that is not known here{more}; known are {_GATE_UP} "
        f"[E, H, 2 I] or [E, H, I] with {_DOWN} [E, I, H], or one tensor an expert by its Hugging Face name",
        tensor=name,
    )
