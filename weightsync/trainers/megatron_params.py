"""Megatron's parameter buffers between a step and the next forward: pending all-gathers, and offloading to the host.

With the distributed optimizer and ``overlap_param_gather`` a step leaves each rank with its own part of the new values;
the rest arrives during the next forward. Until then parameters are a mixture that must not be published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weightsync.errors import TransferError
from weightsync.trainers.megatron_names import NamedLocal

_SAMPLED = 8192  # elements of a buffer
_NAMED = 5  # parameters are enough for an error


class Gathers:
    """The pending all-gathers of a rank's wrapped chunks. Chunks without Megatron's buffers have none."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = [chunk for chunk in map(_data_parallel, chunks) if chunk is not None]

    def finish(self) -> None:
        """Gather what is not gathered yet, and leave the trainer's own schedule as it was.

        Which buckets the next forward must gather is remembered: were this called between backward and step, the
        step's own gather must still happen.
        """
        for chunk in self._chunks:
            if not chunk.ddp_config.overlap_param_gather:
                continue
            waiting = [group for group in _bucket_groups(chunk) if not group.param_gather_dispatched]
            with torch.no_grad():
                for group in _bucket_groups(chunk):
                    if group.param_gather_handle is not None or not group.param_gather_dispatched:
                        group.start_param_sync(force_sync=True)
            for group in waiting:
                group.param_gather_dispatched = False

    def reload(self) -> None:
        """Bring parameters that were offloaded to the host back, and leave gradients where they are."""
        for chunk in self._chunks:
            for buffer in _buffers(chunk):
                if _is_offloaded(buffer):
                    buffer.reload_from_cpu(move_params=True, move_grads=False)


class Samples:
    """A few thousand elements of every parameter buffer at one moment, to notice later that other weights are there.

    Writes through ``parameter.data`` raise no version counter: optimizers write so, and loops that swap reference
    weights in. Only the distributed optimizer keeps parameters in buffers; without it there is nothing to sample.
    """

    def __init__(self, chunks: Iterable[nn.Module]) -> None:
        self._taken = [
            (buffer, _sample(buffer))
            for chunk in filter(None, map(_data_parallel, chunks))
            for buffer in _buffers(chunk)
            if buffer.param_data is not None and buffer.param_data.untyped_storage().nbytes()
        ]

    def different(self) -> list[nn.Parameter]:
        """Parameters that hold other values now; not all of them, but some if any sampled element differs."""
        found: dict[int, nn.Parameter] = {}
        for buffer, before in self._taken:
            if not buffer.param_data.untyped_storage().nbytes():
                continue  # offloaded since
            elements = (_sample(buffer) != before).nonzero().view(-1) * _every(buffer)
            for element in elements.tolist():
                found |= {id(p): p for p, (start, end, _) in buffer.param_index_map.items() if start <= element < end}
                if len(found) >= _NAMED:
                    break
        return list(found.values())


def _every(buffer: Any) -> int:
    return max(1, buffer.param_data.numel() // _SAMPLED)


def _sample(buffer: Any) -> torch.Tensor:
    """Bits, so that NaN equals itself."""
    picked = buffer.param_data.view(-1)[:: _every(buffer)].clone()
    return picked.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[picked.element_size()])


def host_copies(chunks: Iterable[nn.Module], offloaded: str) -> Callable[[NamedLocal], torch.Tensor]:
    """A function that gives a tensor's data where it is now: its own memory or, with ``pinned``, its copy on the host.

    Raises TransferError naming a parameter whose memory was freed and that no option says how to read.
    """
    copies: dict[int, torch.Tensor] = {}
    if offloaded == "pinned":
        for chunk in filter(None, map(_data_parallel, chunks)):
            for buffer in filter(_is_offloaded, _buffers(chunk)):
                copies |= {id(p): _host_view(buffer, p) for p in buffer.param_to_bucket}

    def data(named: NamedLocal) -> torch.Tensor:
        if id(named.tensor) in copies:
            return copies[id(named.tensor)]
        if named.tensor.numel() and not named.tensor.untyped_storage().nbytes():
            raise TransferError(
                f"{named.name} is offloaded: reload the parameters before step_done, or say with trainer_options "
                "offloaded: reload, or offloaded: pinned",
                tensor=named.name,
            )
        return named.tensor.detach()

    return data


def _host_view(buffer: Any, parameter: nn.Parameter) -> torch.Tensor:
    start, end, _ = buffer.param_index_map[parameter]
    return buffer.param_data_cpu.view(-1)[start:end].view(parameter.shape)


def _is_offloaded(buffer: Any) -> bool:
    data = buffer.param_data
    return data is not None and buffer.param_data_cpu is not None and not data.untyped_storage().nbytes()


def _data_parallel(chunk: nn.Module) -> nn.Module | None:
    """The DistributedDataParallel around a chunk, if there is one."""
    module: Any = chunk
    while module is not None and not hasattr(module, "bucket_groups"):
        module = getattr(module, "module", None)
    return module


def _bucket_groups(chunk: Any) -> Iterator[Any]:
    yield from chunk.bucket_groups
    yield from chunk.expert_parallel_bucket_groups


def _buffers(chunk: Any) -> Iterator[Any]:
    yield from chunk.buffers
    yield from chunk.expert_parallel_buffers
