"""Stands in for sgl_kernel where there is no build of it: a CPU server imports its names and calls none of them.

Every attribute exists; calling one raises. Put this folder's parent in front on PYTHONPATH.
"""

from __future__ import annotations


class _Missing:
    """A kernel that this machine does not have."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(
            f"sgl_kernel.{self.__name__} was called, but only an import-only sgl_kernel is installed"
        )

    def __repr__(self) -> str:
        return f"<missing kernel sgl_kernel.{self.__name__}>"


def __getattr__(name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _Missing(name)
