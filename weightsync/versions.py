"""Versions of the libraries that matter to a transfer, without importing one. Standard library only.

This file's text is also run by other interpreters (``envs.probe``), where weightsync need not be installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform

PACKAGES = (
    "ray",
    "torch",
    "sglang",
    "transformers",
    "nemo-automodel",
    "megatron-core",
    "cupy-cuda13x",
    "cuda-bindings",
    "pyzmq",
    "msgspec",
)


def library_versions() -> dict[str, str]:
    """``python``, ``nccl`` and PACKAGES by name, of this process; what is not installed is absent.

    ``weightsync`` is the folder that it is imported from, if it can be.
    """
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            found.setdefault("nccl" if "nccl" in name else name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    spec = importlib.util.find_spec("weightsync")
    if spec is not None and spec.submodule_search_locations:
        found["weightsync"] = spec.submodule_search_locations[0]
    return found


if __name__ == "__main__":
    print(json.dumps(library_versions()))
