"""What ``weightsync doctor`` finds, on machines made of scripts."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from weightsync import doctor, envs
from weightsync.cli import app
from weightsync.config import Config, EnvConfig

DRIVER = envs.library_versions()


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("automodel", "sglang", "sgl_dtensor_v2"):
        project = tmp_path / "envs" / name
        project.mkdir(parents=True)
        (project / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0"\n')
    return tmp_path


def install(root: Path, name: str, **versions: str) -> None:
    """Put an interpreter there that reports ``versions``."""
    found = {"python": DRIVER["python"], "weightsync": "/x"} | {k.replace("_", "-"): v for k, v in versions.items()}
    script(root / "envs" / name / ".venv/bin/python", f"echo '{msgspec.json.encode(found).decode()}'")


def look(root: Path, config: Config | None = None) -> tuple[dict[str, doctor.EnvironmentHealth], list[str]]:
    health = doctor.examine(config, root=root)
    about_environments = [p for p in health.problems if not p.startswith("/dev/shm")]
    return {e.name: e for e in health.environments}, about_environments


def test_an_environment_that_is_not_built_yet_is_no_problem(root):
    found, problems = look(root)
    assert {e.state for e in found.values()} == {"missing"}
    assert problems == []


def test_versions_are_those_that_each_interpreter_reports(root):
    install(root, "automodel", torch="2.13.0", nccl="2.29.7", nemo_automodel="0.7.0")
    found, problems = look(root)
    assert found["automodel"].versions["torch"] == "2.13.0"
    assert found["automodel"].versions["nemo-automodel"] == "0.7.0"
    assert found["automodel"].state == "unmarked"
    assert problems == []


def test_a_pairs_actor_and_whoever_has_ray_must_match_the_driver(root):
    install(root, "sgl_dtensor_v2", ray="1.0")
    install(root, "automodel", ray="2.0")
    install(root, "sglang")
    found, problems = look(root)
    assert f"it has Ray 1.0, the driver has Ray {DRIVER['ray']}" in found["sgl_dtensor_v2"].problem
    assert f"it has Ray 2.0, the driver has Ray {DRIVER['ray']}" in found["automodel"].problem
    assert found["sglang"].problem == "", "an engine needs no Ray"
    assert len(problems) == 2


def test_a_pairs_actor_without_ray_is_a_problem(root):
    install(root, "sgl_dtensor_v2")
    assert "Ray is not installed" in look(root)[0]["sgl_dtensor_v2"].problem


def test_nccl_of_actor_and_engine_must_be_one(root):
    install(root, "sgl_dtensor_v2", ray=DRIVER["ray"], nccl="2.30.7")
    install(root, "sglang", nccl="2.28.9")
    assert look(root)[1] == ["route nccl: NCCL 2.30.7 in sgl_dtensor_v2 and 2.28.9 in sglang are not the same"]
    install(root, "sglang", nccl="2.30.7")
    assert look(root)[1] == []


def test_an_interpreter_that_does_not_work_is_named(root):
    script(root / "envs/automodel/.venv/bin/python", "echo 'no such library' >&2; exit 3")
    found, problems = look(root)
    assert "exit status 3" in found["automodel"].problem
    assert "no such library" in problems[0]


def test_interpreters_of_the_configuration_are_looked_at_too(root):
    config = Config(
        pair="sgl_dtensor_v2",
        envs={"sgl_dtensor_v2": EnvConfig(python=sys.executable), "sglang_box": EnvConfig(python="/no/such/python")},
    )
    found, problems = look(root, config)
    assert found["sgl_dtensor_v2"].state == "named"
    assert found["sgl_dtensor_v2"].versions["ray"] == DRIVER["ray"]
    assert found["sgl_dtensor_v2"].problem == ""
    assert "/no/such/python cannot be run" in found["sglang_box"].problem
    assert len(problems) == 1


def test_gpus_are_those_of_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpus() == []
    script(tmp_path / "nvidia-smi", "echo 'NVIDIA H200, 143771, 570.1'; echo 'NVIDIA H200, 143771, 570.1'")
    assert doctor.gpus() == [doctor.Gpu("NVIDIA H200", 143771, "570.1")] * 2
    script(tmp_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert doctor.gpus() == []


def test_little_shared_memory_is_a_problem(root, monkeypatch):
    health = doctor.examine(root=root)
    usage = os.statvfs("/dev/shm")
    assert health.shm_total_bytes == usage.f_frsize * usage.f_blocks
    monkeypatch.setattr(doctor, "SHM_WANTED_BYTES", health.shm_total_bytes + 1)
    assert any(p.startswith("/dev/shm has ") for p in doctor.examine(root=root).problems)


# --------------------------------------------------------------------------------------------------------- the command


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_the_command_shows_what_was_found_and_its_status_says_whether_it_fits(root, monkeypatch):
    monkeypatch.setattr(envs, "project_root", lambda: root)
    monkeypatch.setattr(doctor, "SHM_WANTED_BYTES", 0)
    install(root, "automodel", torch="2.13.0")
    result = run("doctor")
    assert result.exit_code == 0
    assert "automodel" in result.stdout
    assert "torch 2.13.0" in result.stdout
    assert "no problems found" in result.stdout
    install(root, "sgl_dtensor_v2", ray="1.0")
    result = run("doctor")
    assert result.exit_code == 1
    assert "it has Ray 1.0" in result.stdout


def test_an_error_of_ours_is_a_line_and_not_a_traceback(tmp_path):
    result = run("doctor", "--config", str(tmp_path / "absent.yaml"))
    assert result.exit_code == 1
    assert "ConfigError: cannot read configuration" in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


def test_build_names_an_environment_that_there_is_not(root, monkeypatch):
    monkeypatch.setattr(envs, "project_root", lambda: root)
    result = run("build", "automodle")
    assert result.exit_code == 1
    assert "no environment 'automodle'" in result.stderr
