"""Real SGLang servers for tests: started on demand, one alive at a time (an idle one still takes a core)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import httpx

from weightsync.demo_model import DemoModel, write_model
from weightsync.engines.local import LocalEngine

ENVS = {"0.5.23": "sglang_cpu", "0.5.12": "sglang_cpu_legacy"}
BOOT_SEED = 1
START_TIMEOUT_S = 420.0


class Kind(NamedTuple):
    """What makes two servers interchangeable. ``version`` is SGLang's; each has our receiver as custom loader."""

    version: str
    tp_size: int = 1
    model: DemoModel = DemoModel()

    def __str__(self) -> str:
        return f"sglang-{self.version}-tp{self.tp_size}-{self.model.family}"


class Answer(NamedTuple):
    """Of one greedy generation: the token ids, and how many prompt tokens came from the KV cache."""

    tokens: list[int]
    cached: int


class Servers:
    """Hands out running servers. Weights, versions and pauses are as the last user left them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: tuple[Kind, LocalEngine] | None = None

    def get(self, kind: Kind) -> LocalEngine:
        """The running server if it is of that kind, else a new one that serves seed ``BOOT_SEED``."""
        if self._running is not None and self._running[0] == kind:
            return self._running[1]
        self.close()
        model = write_model(self._folder / str(kind), kind.model, seed=BOOT_SEED)
        engine = LocalEngine(
            model,
            env=ENVS[kind.version],
            tp_size=kind.tp_size,
            dtype=kind.model.dtype,
            log=self._folder / f"{kind}.log",
        )
        self._running = (kind, engine)
        return engine.wait(START_TIMEOUT_S)

    def close(self) -> None:
        """End the running server, if any; the next ``get`` starts a new one. For a test that has killed it, too."""
        if self._running is not None:
            self._running[1].close()
            self._running = None


def ask(url: str, prompt: str, *, max_tokens: int = 8) -> Answer:
    """What the engine says, greedily."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    reply = httpx.post(f"{url}/generate", json={"text": prompt, "sampling_params": sampling}, timeout=120)
    reply.raise_for_status()
    content = reply.json()
    return Answer(content["output_ids"], content["meta_info"]["cached_tokens"])
