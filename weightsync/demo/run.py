"""The demo's training loop: what a user's driver looks like, plus a table. Imports no torch, no sglang, no trainer."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

import weightsync
from weightsync import envs
from weightsync.config import load_config
from weightsync.demo.casts import CASTS, Cast
from weightsync.engines.local import LocalEngine, free_port
from weightsync.errors import EngineRejected, VerifyMismatch
from weightsync.ray_channel import start_ray

PROMPT = "What do you say?"
SENTENCE = " New weights arrive after every step."
WORLD_SIZE = 2


class Row(msgspec.Struct, frozen=True):
    """One push of the demo, as the table shows it."""

    step: int
    loss: float
    says: str
    weight_version: str
    push_ms: float
    verified: bool


def run(
    *, pair: str = "sgl_dtensor_v2", pushes: int = 8, steps_per_push: int = 4, console: Console | None = None
) -> list[Row]:
    """Train, push, ask, compare. Raises WeightSyncError as soon as engine and trainer disagree on one token.

    Returns the table's rows.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = 110  # a file or a pipe has room for the whole table
    started = time.monotonic()
    cast = CASTS[pair]
    for name in (pair, cast.env, "sglang_cpu"):
        envs.ensure(name, progress=lambda line: console.print(f"[dim]{line}", highlight=False))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-"))
        model = _write_model(pair, Path(folder) / "model")
        engine = stack.enter_context(LocalEngine(model, log=Path(folder) / "sglang.log"))
        trainers = stack.enter_context(_trainers(cast, model, console))
        with console.status("starting SGLang on the CPU (about a minute)"):
            engine.wait()
        console.print(f"SGLang {_get(engine.url, '/server_info')['version']} serves at {engine.url}")
        config = load_config({"pair": pair, "timeout_s": 60.0})
        sync = stack.enter_context(
            weightsync.launch(config, publishers=[t.address for t in trainers], engines=[engine.url])
        )
        console.print(sync.plan().explain(), highlight=False, markup=False, soft_wrap=True)
        rows = _loop(sync, trainers, engine, _Tokens(model), pushes, steps_per_push, cast.title, console)
    console.print(f"\ndone in {time.monotonic() - started:.0f} s")
    return rows


def _loop(
    sync: weightsync.WeightSync,
    trainers: list[_Trainer],
    engine: LocalEngine,
    tokens: _Tokens,
    pushes: int,
    steps_per_push: int,
    title: str,
    console: Console,
) -> list[Row]:
    prompt = tokens.encode(PROMPT)
    text = prompt + tokens.encode(SENTENCE)
    rows: list[Row] = []
    with Live(_table(title, rows), console=console, refresh_per_second=4) as live:
        for i in range(pushes):
            step = i * steps_per_push
            loss = _all(trainers, "train", text, len(prompt), steps_per_push if i else 0)[0]
            _all(trainers, "step_done", step)
            report = sync.push(step)
            expected = _all(trainers, "greedy", prompt, len(text) - len(prompt))[0]
            said, version = _ask(engine.url, prompt, len(expected))
            row = Row(step, loss, tokens.decode(said), version, report.seconds["total"] * 1e3, report.verified)
            rows.append(row)
            live.update(_table(title, rows))
            _compare(row, said, expected, tokens, engine.url)
    return rows


def _compare(row: Row, said: list[int], expected: list[int], tokens: _Tokens, url: str) -> None:
    if row.weight_version != str(row.step):
        raise EngineRejected(f"after the push of step {row.step} it reports version {row.weight_version!r}", engine=url)
    if not row.verified:
        raise VerifyMismatch(f"the push of step {row.step} was not verified", engine=url)
    if said != expected:
        raise VerifyMismatch(
            f"after step {row.step} the engine says {tokens.decode(said)!r}, the trainer's own forward "
            f"{tokens.decode(expected)!r}",
            engine=url,
        )


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title)
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("the engine says", no_wrap=True)
    for name in ("weight_version", "push ms"):
        table.add_column(name, justify="right")
    table.add_column("verified")
    for r in rows:
        loss = "" if r.loss != r.loss else f"{r.loss:.4f}"
        table.add_row(
            str(r.step), loss, repr(r.says), r.weight_version, f"{r.push_ms:.0f}", "yes" if r.verified else "NO"
        )
    return table


# ------------------------------------------------------------------------------------------------ training ranks


class _Trainer:
    """A training rank under Ray, and its publisher's address."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.address = ""


@contextlib.contextmanager
def _trainers(cast: Cast, model: Path, console: Console) -> Iterator[list[_Trainer]]:
    """Two training ranks as Ray actors in the trainer's environment."""
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    if not ray.is_initialized():
        start_ray(num_cpus=WORLD_SIZE)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    runtime_env = envs.runtime_env(envs.resolve(cast.env))
    trainer_class = getattr(importlib.import_module(cast.module), cast.name)
    make = ray.remote(trainer_class).options(num_cpus=0, runtime_env=runtime_env).remote
    trainers = [_Trainer(make(rank, WORLD_SIZE, rendezvous, str(model))) for rank in range(WORLD_SIZE)]
    try:
        console.print(f"{WORLD_SIZE} {cast.note}")
        for trainer, address in zip(trainers, _all(trainers, "address"), strict=True):
            trainer.address = address
        yield trainers
    finally:
        for trainer in trainers:
            ray.kill(trainer.actor)
        ray.shutdown()


def _all(trainers: list[_Trainer], method: str, *args: Any) -> list[Any]:
    import ray

    return ray.get([getattr(t.actor, method).remote(*args) for t in trainers], timeout=180)


# -------------------------------------------------------------------------------------------------- model, engine


class _Tokens:
    """The model's byte-level vocabulary, as far as printable ASCII goes."""

    def __init__(self, model: Path) -> None:
        vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self._ids = {(" " if text == "Ġ" else text): i for text, i in vocab.items()}
        self._texts = {i: text for text, i in self._ids.items()}

    def encode(self, text: str) -> list[int]:
        return [self._ids[c] for c in text]

    def decode(self, tokens: list[int]) -> str:
        texts = (self._texts.get(t, "?") for t in tokens)
        return "".join(text if text.isascii() and len(text) == 1 else "\N{MIDDLE DOT}" for text in texts)


def _write_model(pair: str, folder: Path) -> Path:
    """Write the seeded model in the actor's environment, which has numpy."""
    environment = envs.resolve(pair)
    script = "import sys; from weightsync.demo_model import write_model; write_model(sys.argv[1])"
    subprocess.run(
        [environment.python, "-c", script, str(folder)], env=envs.process_env(environment), check=True, timeout=120
    )
    return folder


def _ask(url: str, prompt: list[int], count: int) -> tuple[list[int], str]:
    """Greedy tokens from the engine, and the weight version that it reports."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answer = _get(url, "/generate", {"input_ids": prompt, "sampling_params": sampling})
    return answer["output_ids"], _get(url, "/model_info")["weight_version"]


def _get(url: str, path: str, body: dict | None = None) -> dict:
    import urllib.request

    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def main() -> None:
    """Run the demo; exits with status 1 and the reason if anything disagrees."""
    try:
        run()
    except weightsync.WeightSyncError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        raise SystemExit(1) from e


if __name__ == "__main__":
    main()
