"""What a fake engine does with payloads: open them as strictly as 0.5.23 does, and load them into a torch module."""

from __future__ import annotations

import base64
import importlib
import io
import pickle
from typing import Any


class Killed(Exception):
    """What would take a real scheduler down."""


def load_into(model: Any, content: Any, load_format: str | None) -> None:
    """Load as a scheduler does; an exception on the way is a Killed."""
    try:
        if load_format is None:
            model.load_weights(content)
        elif load_format == "flattened_bucket":
            model.load_weights(unflatten(content))
        else:
            module, _, function = load_format.rpartition(".")
            getattr(importlib.import_module(module), function)(model, content)
    except Exception as e:
        raise Killed(f"{type(e).__name__}: {e}") from e


def unflatten(content: dict[str, Any]) -> list[tuple[str, Any]]:
    """The tensors of a flattened bucket, as views of its buffer."""
    flat = content["flattened_tensor"]
    return [(m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)) for m in content["metadata"]]


def open_payload(payload: str) -> Any:
    """The content of a base64 payload; raises Killed on a global that 0.5.23 does not allow, or if it is malformed."""
    try:
        return _StrictUnpickler(io.BytesIO(base64.b64decode(payload))).load()
    except (ValueError, EOFError, pickle.UnpicklingError) as e:
        raise Killed(f"{type(e).__name__}: {e}") from e


class _StrictUnpickler(pickle.Unpickler):
    ALLOWED = {
        "collections.OrderedDict",
        "types.SimpleNamespace",
        "torch.Size",
        "torch.Tensor",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
        "torch.storage._load_from_bytes",
        "torch._utils._rebuild_tensor_v2",
        "torch.multiprocessing.reductions.rebuild_storage_filename",
        "torch.multiprocessing.reductions.rebuild_tensor",
        "torch.multiprocessing.reductions.rebuild_typed_storage",
    }
    DTYPES = {
        *("bool", "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
        *("uint8", "int8", "int16", "int32", "int64"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return _rebuild_cuda_tensor
        if f"{module}.{name}" in self.ALLOWED or (module == "torch" and name in self.DTYPES):
            return super().find_class(module, name)
        raise Killed(f"Blocked unsafe global ({module}.{name})")


def _rebuild_cuda_tensor(*arguments: Any) -> Any:
    """As SGLang patches torch's: the device is named by UUID, and a GPU that is masked from the engine kills it."""
    import torch
    from torch.multiprocessing import reductions

    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    before, uuid, after = arguments[:6], arguments[6], arguments[7:]
    if uuid not in uuids:
        raise Killed(f"Invalid device_uuid={uuid}")
    return reductions.rebuild_cuda_tensor(*before, uuids.index(uuid), *after)
