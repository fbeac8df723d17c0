"""The demo as a user starts it, and that its processes live apart: own environments, own torch, nobody else's code."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.servers import Servers
from weightsync import envs
from weightsync.deadline import Deadline

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / ".venv" / "bin" / "python"
TIMEOUT_S = 400
ENGINE_CODE, TRAINER_CODE = ["sglang"], ["nemo_automodel", "megatron"]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


def has(python: Path, package: str) -> bool:
    """Whether that interpreter would find ``package``, by its own word."""
    question = f"import importlib.util; print(importlib.util.find_spec({package!r}) is not None)"
    done = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    return {"True": True, "False": False}[done.stdout.strip()]


def told(output: str, who: str) -> list:
    """What ``demo_asking`` printed about ``who``."""
    return json.loads(re.search(rf"{who} (\[.*\])$", output, re.MULTILINE)[1])  # a table may end on the same line


def test_the_demo_ends_well_and_its_processes_import_only_their_own(servers: Servers) -> None:
    servers.close()  # the demo starts one
    done = subprocess.run(
        [DRIVER, "-m", "tests.e2e.demo_asking", "--pushes", "3"],
        cwd=ROOT,
        env=envs.process_env(envs.resolve("sgl_dtensor_v2")) | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    screen = done.stdout[-6000:] + done.stderr[-3000:]
    assert done.returncode == 0, screen
    assert len(re.findall(r"│\s+\d+ │.*│ yes", done.stdout)) >= 3, screen
    assert "done in" in done.stdout
    trainers, driver = told(done.stdout, "TRAINERS"), told(done.stdout, "DRIVER")
    assert len(trainers) == 2
    for modules in trainers:
        assert {"torch", "nemo_automodel", "weightsync"} <= set(modules)
        assert not {*ENGINE_CODE, "sgl_kernel"} & set(modules)
    assert "ray" in driver and not {"torch", *ENGINE_CODE, *TRAINER_CODE} & set(driver)


def test_every_environment_has_its_own_and_none_of_the_others() -> None:
    trainer, engine, actor = (envs.resolve(n).python for n in ("automodel", "sglang_cpu", "sgl_dtensor_v2"))
    expected = {
        (DRIVER, "ray"): True,
        (DRIVER, "torch"): False,
        (DRIVER, "sglang"): False,
        (trainer, "nemo_automodel"): True,
        (trainer, "sglang"): False,
        (engine, "sglang"): True,
        (engine, "nemo_automodel"): False,
        (engine, "megatron"): False,
        (engine, "ray"): False,
        (actor, "torch"): True,
        (actor, "sglang"): False,
        (actor, "nemo_automodel"): False,
    }
    found = {(python, package): has(python, package) for python, package in expected}
    assert found == expected


def test_trainer_and_engine_have_different_torch() -> None:
    found = {
        name: envs.probe(envs.resolve(name), Deadline(60.0, name)).versions["torch"]
        for name in ("automodel", "sglang_cpu", "sglang_cpu_legacy")
    }
    assert len({version.partition("+")[0] for version in found.values()}) == 3, found
