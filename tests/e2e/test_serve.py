"""Without Ray: ``weightsync serve`` beside a torchrun job of nemo-automodel ranks, and a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

import weightsync
from tests.servers import Kind, Servers, ask
from weightsync import envs
from weightsync.demo_model import write_model
from weightsync.engines.local import free_port
from weightsync.errors import ConfigError

KIND = Kind("0.5.23")
PROMPT = "The quick brown fox jumps over"
START_S, TRAIN_S = 60.0, 240.0

pytestmark = pytest.mark.timeout(900)


def in_environment(name: str, *command: str | Path, log: Path) -> subprocess.Popen:
    """A program of an environment's ``bin``, in a process group of its own, its output in ``log``."""
    environment = envs.resolve(name)
    program, *arguments = command
    with open(log, "wb") as output:
        return subprocess.Popen(
            [environment.python.parent / program, *arguments],
            env=envs.process_env(environment) | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ended(process: subprocess.Popen, timeout_s: float) -> int:
    """Its exit status; its whole group is killed if it takes longer."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def test_a_torchrun_job_pushes_through_a_served_actor_that_outlives_it(servers: Servers, tmp_path: Path) -> None:
    url = servers.get(KIND).url
    before = ask(url, PROMPT).tokens
    config, addresses, actor = tmp_path / "sync.yaml", tmp_path / "publishers", tmp_path / "actor"
    config.write_text(f"pair: sgl_dtensor_v2\nengines:\n  - url: {url}\nconnect_timeout_s: {TRAIN_S}\n")
    model = write_model(tmp_path / "model", KIND.model, seed=5)
    logs = {name: tmp_path / f"{name}.log" for name in ("serve", "torchrun")}
    own = ["--publishers", addresses, "--count", "2", "--address-file", actor]
    serve = in_environment("sgl_dtensor_v2", "weightsync", "serve", config, *own, log=logs["serve"])
    run = ["--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "weightsync.demo.torchrun"]
    job = ["--model", model, "--addresses", addresses, "--actor", actor, "--steps", "3"]
    torchrun = in_environment("automodel", "torchrun", *run, *job, log=logs["torchrun"])
    try:
        status = ended(torchrun, TRAIN_S)
        said = {name: log.read_text(errors="replace") for name, log in logs.items()}
        assert status == 0, said
        steps = re.findall(r"^step (\d+) loss ([\d.]+) (\w+) verified=(\w+)$", said["torchrun"], re.MULTILINE)
        assert [(step, route, ok) for step, _, route, ok in steps] == [(s, "shm", "True") for s in "123"], said
        assert float(steps[2][1]) < float(steps[0][1]), f"it did not learn: {steps}"
        assert httpx.get(f"{url}/model_info", timeout=30).json()["weight_version"] == "3"
        assert ask(url, PROMPT).tokens != before
        _assert_lives_on(actor, serve, url)
        serve.send_signal(signal.SIGTERM)
        assert ended(serve, START_S) == 0, said["serve"]
    finally:
        for process in (torchrun, serve):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _assert_lives_on(actor: Path, serve: subprocess.Popen, url: str) -> None:
    """The job is over; the actor still answers who knows its token, and nobody else."""
    address = actor.read_text().strip()
    assert actor.stat().st_mode & 0o077 == 0, "the address carries a token: for the owner's eyes only"
    time.sleep(0.5)
    assert serve.poll() is None
    with weightsync.connect(address, timeout_s=30.0) as again:
        state = again.status()
        assert state.step == 3 and [(e.url, e.state) for e in state.engines] == [(url, "serving")]
        assert again.plan().num_tensors > 20
    stranger = weightsync.connect(address.partition("#")[0] + "#" + "0" * 32, timeout_s=30.0)
    with pytest.raises(ConfigError, match="token"):
        stranger.status()
    stranger.close()
    with weightsync.connect(address, timeout_s=30.0) as again:
        assert again.status().step == 3
