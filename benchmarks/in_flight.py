"""Requests that keep an engine busy while weights are pushed. Runs in the benchmark; no torch."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Sequence

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NEW_TOKENS = 512
TIMEOUT_S = 60.0


class Requests:
    """``count`` requests at a time to each engine, each followed by another. A context manager; ``answered`` counts
    those ended."""

    def __init__(self, urls: Sequence[str], count: int) -> None:
        self.answered = self.failed = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(url,), daemon=True) for url in [*urls] * count]

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        time.sleep(0.5)  # until they generate
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=TIMEOUT_S)

    def _run(self, url: str) -> None:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling}).encode()
        while not self._stop.is_set():
            request = urllib.request.Request(f"{url}/generate", data=body, headers={"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                    answer.read()
                ended = True
            except OSError:
                ended = False
                time.sleep(0.05)
            with self._lock:
                self.answered += ended
                self.failed += not ended
