"""The fake engine's side of ``/init_weights_update_group`` and its sisters: a gloo member a TP rank, made by hand.

The store's prefixes are spelled out here, apart from the product's way of making a group, as torch derives them from
SGLang's call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=15)


class Groups:
    """The update groups of one engine with ``models``, one a TP rank; answers are ``(status, body)``."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models
        self._members: dict[str, list[ProcessGroupGloo]] = {}
        self._names: set[str] = set()  # as torch keeps them: a name may be used once until it is destroyed
        self._updating = threading.Lock()  # SGLang's scheduler takes one request after the other

    def init(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["group_name"]
        if name in self._names:
            text = "The specified group name has already been created, please use a different group name"
            return 400, {"success": False, "message": f"Failed to initialize custom process group: {text}."}
        self._names.add(name)
        members, errors = self._each_rank(lambda rank: _member(body, rank))
        if errors:
            self._names.discard(name)
            return 400, {"success": False, "message": f"Failed to initialize custom process group: {errors[0]}."}
        self._members[name] = members
        return 200, {"success": True, "message": "Succeeded to initialize custom process group."}

    def destroy(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["group_name"] not in self._members:
            return 400, {"success": False, "message": "The group to be destroyed does not exist."}
        del self._members[body["group_name"]]
        self._names.discard(body["group_name"])
        return 200, {"success": True, "message": "Succeeded to destroy custom process group."}

    def knows(self, name: str) -> bool:
        return name in self._members

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Receive one flattened bucket in every rank and load it there."""
        members = self._members[body["group_name"]]
        with self._updating:
            received, errors = self._each_rank(lambda rank: _receive(members[rank], body))
            if errors:
                return 400, {"success": False, "message": f"Failed to receive weights: {errors[0]}"}
            for model, tensors in zip(self._models, received, strict=True):
                model.load_weights(tensors)
        return 200, {"success": True, "message": "Succeeded to update parameter online."}

    def close(self) -> None:
        self._members.clear()

    def _each_rank(self, function: Any) -> tuple[list[Any], list[str]]:
        results: list[Any] = [None] * len(self._models)
        errors: list[str] = []

        def run(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except RuntimeError as e:
                errors.append(str(e).splitlines()[0])

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self._models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results, errors


def _member(body: dict[str, Any], rank: int) -> ProcessGroupGloo:
    store = TCPStore(body["master_address"], body["master_port"], body["world_size"], is_master=False, timeout=TIMEOUT)
    name = body["group_name"]
    prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    assert body["backend"] == "gloo"
    return ProcessGroupGloo(prefixed, body["rank_offset"] + rank, body["world_size"], TIMEOUT)


def _receive(member: ProcessGroupGloo, body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    dtypes = [getattr(torch, d) for d in body["dtypes"]]
    sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
    if body["load_format"] is None:
        whole = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        for work in [_broadcast(member, tensor) for tensor in whole]:
            work.wait()
        return list(zip(body["names"], whole, strict=True))
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    _broadcast(member, flat).wait()
    tensors, start = [], 0
    for name, dtype, shape, size in zip(body["names"], dtypes, body["shapes"], sizes, strict=True):
        if start % dtype.itemsize:
            raise RuntimeError(f"Unaligned received tensor {name}: byte offset {start}, dtype {dtype}")
        tensors.append((name, flat[start : start + size].view(dtype).reshape(shape)))
        start += size
    return tensors


def _broadcast(member: ProcessGroupGloo, tensor: torch.Tensor) -> Any:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return member.broadcast([tensor], options)
