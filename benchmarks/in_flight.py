"""Requests to engines: those that keep one busy while weights are pushed, and one after a push. No torch."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Sequence

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NEW_TOKENS = 512
TIMEOUT_S = 60.0
FIRST_TIMEOUT_S = 120.0  # an engine compiles its kernels when it first generates


class Requests:
    """``count`` requests at a time to each engine, each followed by another. A context manager; ``answered`` counts
    those ended."""

    def __init__(self, urls: Sequence[str], count: int) -> None:
        self.answered = self.failed = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._warm = threading.Barrier(len(urls) * count + 1)
        self._threads = [threading.Thread(target=self._run, args=(url,), daemon=True) for url in [*urls] * count]

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        self._warm.wait(FIRST_TIMEOUT_S)
        time.sleep(0.5)  # until they generate
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=TIMEOUT_S)

    def _run(self, url: str) -> None:
        self._ask(url, 16, FIRST_TIMEOUT_S)
        self._warm.wait(FIRST_TIMEOUT_S)
        while not self._stop.is_set():
            ended = self._ask(url, NEW_TOKENS, TIMEOUT_S)
            with self._lock:
                self.answered += ended
                self.failed += not ended

    def _ask(self, url: str, max_new_tokens: int, timeout_s: float) -> bool:
        try:
            generate(url, max_new_tokens, timeout_s)
        except OSError:
            time.sleep(0.05)
            return False
        return True


def generate(url: str, max_new_tokens: int, timeout_s: float = FIRST_TIMEOUT_S) -> None:
    """Have an engine answer one request with so many tokens. Raises OSError."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/generate", data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answer.read()
