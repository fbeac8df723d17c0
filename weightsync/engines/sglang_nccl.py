"""What is known of an SGLang's NCCL without asking it: the version that its torch pin brings, and what it sets."""

from __future__ import annotations

from typing import Any

# From which SGLang on, the NCCL of the torch that it pins.
_NCCL_SINCE = (
    ((0, 5, 9), "2.27.5"),
    ((0, 5, 12), "2.28.9"),
    ((0, 5, 18), "2.29.7"),
    ((0, 5, 22), "2.30.7"),
)
_KNOWN_TO = (0, 5, 23)


def nccl_of(version: tuple[int, int, int]) -> str:
    """The NCCL version that this SGLang is installed with; "" if it is older or newer than those that are known."""
    if version > _KNOWN_TO:
        return ""
    return next((nccl for since, nccl in reversed(_NCCL_SINCE) if version >= since), "")


def nccl_variables(server: dict[str, Any]) -> dict[str, str]:
    """The variables by which a member of a group must agree with the engine of this ``/server_info``.

    SGLang sets these at start unless they are set already; with ``--enable-symm-mem`` it sets them in any case.
    """
    symmetric = bool(server.get("enable_symm_mem"))
    sharded = bool(server.get("enable_kv_cache_sharding")) and (server.get("nnodes") or 1) == 1
    variables = {"NCCL_CUMEM_ENABLE": str(int(symmetric or (sharded and not server.get("enable_memory_saver"))))}
    if not (symmetric or server.get("enable_nccl_nvls")):
        variables["NCCL_NVLS_ENABLE"] = "0"
    return variables
