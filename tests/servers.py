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
PROBE = [17, 5, 96, 33, 64, 2, 81, 12, 40, 71, 9, 55]


class Kind(NamedTuple):
    """What makes two servers interchangeable. ``version`` is SGLang's; each has our receiver as custom loader."""

    version: str
    tp_size: int = 1
    model: DemoModel = DemoModel()

    def __str__(self) -> str:
        model, usual = self.model, DemoModel()
        differs = [f"{model.vocab_size}words"] if model.vocab_size != usual.vocab_size else []
        differs += ["tied"] if model.tie_word_embeddings else []
        differs += [model.dtype] if model.dtype != usual.dtype else []
        return "-".join([f"sglang-{self.version}-tp{self.tp_size}-{model.family}", *differs])


PADDED = Kind("0.5.12", tp_size=2, model=DemoModel(vocab_size=101))
PADDED_TIED = Kind("0.5.23", tp_size=2, model=DemoModel(family="llama", vocab_size=101, tie_word_embeddings=True))
"""101 words are 128 rows in the engine, 64 a rank. Few kinds, used by many tests: each start takes a minute."""


class Answer(NamedTuple):
    """Of one greedy generation: the token ids, and how many prompt tokens came from the KV cache."""

    tokens: list[int]
    cached: int


class Servers:
    """Hands out running servers. Weights, versions and pauses are as the last user left them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: tuple[Kind, LocalEngine] | None = None
        self._fresh: dict[Kind, list[list[float]]] = {}

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
        engine.wait(START_TIMEOUT_S)
        self._fresh[kind] = log_probabilities(engine.url, kind.model.vocab_size)
        return engine

    def fresh(self, kind: Kind) -> list[list[float]]:
        """What ``log_probabilities`` gave when the running server had just loaded ``BOOT_SEED`` from disk."""
        self.get(kind)
        return self._fresh[kind]

    def close(self) -> None:
        """End the running server, if any; the next ``get`` starts a new one. For a test that has killed it, too."""
        if self._running is not None:
            self._running[1].close()
            self._running = None


def log_probabilities(url: str, vocab_size: int) -> list[list[float]]:
    """Teacher-forced: for every prefix of ``PROBE`` the log-probability of each of ``vocab_size`` tokens, by id."""
    body = {
        "input_ids": PROBE,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": vocab_size,
    }
    reply = httpx.post(f"{url}/generate", json=body, timeout=120)
    reply.raise_for_status()
    found = reply.json()["meta_info"]
    positions = [*found["input_top_logprobs"][1:], *found["output_top_logprobs"][:1]]
    rows = [[p for _, p in sorted((token, p) for p, token, _ in position)] for position in positions]
    assert len(rows) == len(PROBE) and {len(row) for row in rows} == {vocab_size}, [len(row) for row in rows]
    return rows


def ask(url: str, prompt: str, *, max_tokens: int = 8) -> Answer:
    """What the engine says, greedily."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    reply = httpx.post(f"{url}/generate", json={"text": prompt, "sampling_params": sampling}, timeout=120)
    reply.raise_for_status()
    content = reply.json()
    return Answer(content["output_ids"], content["meta_info"]["cached_tokens"])
