"""Real SGLang servers for tests: started on demand, one alive at a time (an idle one still takes a core)."""

from __future__ import annotations

import time
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
    """Teacher-forced: for every prefix of ``PROBE`` the log-probability of each of ``vocab_size`` tokens, by id.

    Each prefix is asked of an empty cache, so that equal weights compute the same. One question for all prefixes would
    do, but on a CPU it ends SGLang 0.5.12, which wants pinned memory for log-probabilities of the prompt.
    """
    return [_next_token(url, PROBE[: i + 1], vocab_size) for i in range(len(PROBE))]


def _next_token(url: str, prefix: list[int], vocab_size: int) -> list[float]:
    body = {
        "input_ids": prefix,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": vocab_size,
    }
    _flush(url)
    reply = httpx.post(f"{url}/generate", json=body, timeout=120)
    reply.raise_for_status()
    by_token = {token: p for p, token, _ in reply.json()["meta_info"]["output_top_logprobs"][0]}
    assert sorted(by_token) == list(range(vocab_size)), f"{len(by_token)} of {vocab_size} tokens"
    return [by_token[token] for token in range(vocab_size)]


def _flush(url: str, timeout_s: float = 10.0) -> None:
    """Empty the cache; refused for a moment after a request has ended."""
    give_up = time.monotonic() + timeout_s
    while (reply := httpx.post(f"{url}/flush_cache", timeout=30)).is_error:
        assert time.monotonic() < give_up, reply.text
        time.sleep(0.05)


def ask(url: str, prompt: str, *, max_tokens: int = 8) -> Answer:
    """What the engine says, greedily."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    reply = httpx.post(f"{url}/generate", json={"text": prompt, "sampling_params": sampling}, timeout=120)
    reply.raise_for_status()
    content = reply.json()
    return Answer(content["output_ids"], content["meta_info"]["cached_tokens"])
