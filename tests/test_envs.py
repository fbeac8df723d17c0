"""Which environment, is it whole, does it fit. Projects here are throwaway uv projects without dependencies."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from weightsync import builds, envs
from weightsync.config import EnvConfig
from weightsync.deadline import Deadline
from weightsync.errors import EnvError

ROOT = Path(__file__).resolve().parent.parent
UV = builds.find_uv(ROOT / "envs")
HERE = platform.python_version()


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with one environment, ``tiny``; its path has a space."""
    project = tmp_path / "a checkout" / "envs" / "tiny"
    project.mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        '[project]\nname = "tiny"\nversion = "0"\nrequires-python = ">=3.12"\n'
        "[dependency-groups]\nextra = []\n[tool.uv]\npackage = false\n"
    )
    subprocess.run([*UV, "lock", "--offline", "--project", project], check=True, capture_output=True, timeout=60)
    tools = project.parent.parent / ".tools"
    tools.mkdir()
    script(tools / "uv", f'#!/bin/sh\nexec {shlex.join(UV)} "$@"\n')  # as bootstrap.sh leaves it, whatever PATH has
    return project.parent.parent


@pytest.fixture
def project(root: Path) -> Path:
    return root / "envs" / "tiny"


@pytest.fixture
def counted(tmp_path: Path) -> tuple[list[str], Path]:
    """The real uv, slowed down so that builds would overlap; and the file into which it writes one line a run."""
    log = tmp_path / "runs"
    uv = script(
        tmp_path / "uv", f'#!/bin/sh\necho run >> {shlex.quote(str(log))}\nsleep 0.5\nexec {shlex.join(UV)} "$@"\n'
    )
    return [uv], log


@pytest.fixture
def stuck(tmp_path: Path) -> tuple[list[str], Path]:
    """A uv that writes half an environment and goes on for ever; and the file into which it writes its process id."""
    pid = tmp_path / "pid"
    uv = script(
        tmp_path / "stuck_uv",
        '#!/bin/sh\n[ "$1" = sync ] || exit 0\nwhile [ "$1" != --project ]; do shift; done\n'
        f'mkdir -p "$2/.venv/bin"; touch "$2/.venv/bin/half"; echo $$ > {shlex.quote(str(pid))}\nexec sleep 600\n',
    )
    return [uv], pid


def ask(root: Path, uv: list[str], timeout_s: float = 60.0) -> subprocess.Popen:
    """A process of its own that asks for the environment and says what became of it."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom weightsync import envs\n"
        f"env = envs.ensure('tiny', root=Path({str(root)!r}), uv={uv!r}, timeout_s={timeout_s})\n"
        "import subprocess; print(subprocess.check_output([env.python, '-c', 'print(6 * 7)'], text=True))"
    )
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def wait_for(path: Path) -> str:
    until = time.monotonic() + 20
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text().strip()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


# --------------------------------------------------------------------------------------------------- building once


def test_eight_processes_at_once_build_once_and_all_get_it_whole(root, project, counted):
    uv, log = counted
    askers = [ask(root, uv) for _ in range(8)]
    for asker in askers:
        out, err = asker.communicate(timeout=90)
        assert (asker.returncode, out.strip()) == (0, "42"), err
    assert log.read_text().split() == ["run"]
    assert builds.is_whole(project)


def test_built_half_and_killed_is_thrown_away_and_rebuilt(root, project, stuck):
    uv, pid_file = stuck
    builder = ask(root, uv)
    pid = int(wait_for(pid_file))
    builder.kill()
    os.kill(pid, signal.SIGKILL)
    builder.communicate(timeout=10)
    assert (project / ".venv/bin/half").exists()
    assert not builds.is_whole(project)
    said: list[str] = []
    env = envs.ensure("tiny", root=root, progress=said.append)
    assert not (project / ".venv/bin/half").exists()
    assert subprocess.check_output([env.python, "-c", "print(1)"], text=True) == "1\n"
    assert any("cut short" in line for line in said)


def test_a_killed_builder_blocks_nobody_but_its_uv_keeps_the_lock_while_it_still_writes(root, project, stuck):
    uv, pid_file = stuck
    builder = ask(root, uv)
    pid = int(wait_for(pid_file))
    builder.kill()
    builder.communicate(timeout=10)
    with pytest.raises(EnvError, match=r"another process was still building it after 0\.3 s"):
        envs.ensure("tiny", root=root, timeout_s=0.3)
    waiting = ask(root, UV)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out.strip()) == (0, "42"), err
    assert builds.is_whole(project)


def test_a_build_that_takes_too_long_is_ended_and_named(root, project, stuck):
    uv, pid_file = stuck
    start = time.monotonic()
    with pytest.raises(EnvError, match=r"envs/tiny took longer than 1 s"):
        envs.ensure("tiny", root=root, uv=uv, timeout_s=1.0)
    assert time.monotonic() - start < 10
    assert not alive(int(wait_for(pid_file)))
    assert not builds.is_whole(project)


def test_uvs_own_words_are_in_the_error_and_the_next_attempt_starts_over(root, project, tmp_path):
    uv = script(tmp_path / "bad_uv", "#!/bin/sh\necho 'error: no space left'; exit 2\n")
    with pytest.raises(EnvError, match=r"exit status 2.*no space left"):
        envs.ensure("tiny", root=root, uv=[uv])
    envs.ensure("tiny", root=root)
    assert builds.is_whole(project)


def test_a_uv_that_is_not_there_is_named(root):
    with pytest.raises(EnvError, match=r"/nonexistent/uv: No such file"):
        envs.ensure("tiny", root=root, uv=["/nonexistent/uv"])


# ------------------------------------------------------------------------------------------------------- staying whole


def test_built_again_only_when_something_changed(root, project, counted):
    uv, log = counted

    def runs_of_ensure(**more) -> int:
        before = len(log.read_text().split()) if log.exists() else 0
        envs.ensure("tiny", root=root, uv=uv, **more)
        return len(log.read_text().split()) - before

    assert runs_of_ensure() == 1
    assert runs_of_ensure() == 0
    with open(project / "pyproject.toml", "a") as file:
        file.write("# a comment\n")
    assert runs_of_ensure() == 1
    assert runs_of_ensure(groups=["extra"]) == 1
    assert runs_of_ensure() == 0, "an environment with a group is still whole for who asks without it"
    (project / ".venv/lib/python3.12/site-packages/by_hand-1.dist-info").mkdir()
    assert runs_of_ensure() == 1, "installed or removed by hand: uv must look at it"
    assert runs_of_ensure(groups=["extra"]) == 0, "and keeps the groups that were there"
    (project / ".venv/bin/python").unlink()
    assert runs_of_ensure() == 1
    assert builds.is_whole(project)


def test_a_moved_environment_is_rebuilt(root, project):
    envs.ensure("tiny", root=root)
    elsewhere = root.rename(root.parent / "moved")
    said: list[str] = []
    env = envs.ensure("tiny", root=elsewhere, progress=said.append)
    assert any("moved" in line for line in said)
    assert str(elsewhere) in (env.project / ".venv/bin/activate").read_text()


def test_an_environment_made_by_hand_is_completed_not_thrown_away(root, project):
    subprocess.run([*UV, "sync", "--frozen", "--project", project], check=True, capture_output=True, timeout=60)
    (project / ".venv/bin/mine").touch()
    envs.ensure("tiny", root=root)
    assert (project / ".venv/bin/mine").exists()
    assert builds.is_whole(project)


# ------------------------------------------------------------------------------------------------------------- resolve


def test_an_unknown_name_lists_those_there_are(root):
    with pytest.raises(EnvError, match=r"no environment 'tinny' in .*\(there are: tiny\).*envs\.tinny\.python"):
        envs.resolve("tinny", root=root)


def test_without_a_checkout_the_error_says_how_to_name_an_interpreter(monkeypatch):
    monkeypatch.setattr(envs, "project_root", lambda: None)
    with pytest.raises(EnvError, match=r"without its envs/ folder.*envs\.tiny\.python"):
        envs.resolve("tiny")
    assert envs.resolve("tiny", EnvConfig(python=sys.executable)).python == Path(sys.executable)


def test_stubs_follow_the_configured_pythonpath(root, project):
    (project / "stubs").mkdir()
    env = envs.resolve("tiny", EnvConfig(pythonpath=["/first"]), root=root)
    assert env.pythonpath == ("/first", str(project / "stubs"))
    assert env.python == project / ".venv/bin/python"


def test_a_named_interpreter_replaces_the_project_and_is_never_built(root):
    config = EnvConfig(python=sys.executable, pythonpath=["/x"], env={"A": "b"})
    env = envs.ensure("tiny", config, root=root, uv=["/nonexistent/uv"])
    assert (env.python, env.project, env.pythonpath, env.env) == (Path(sys.executable), None, ("/x",), {"A": "b"})


# ---------------------------------------------------------------------------------------------------------- check_fits


def fake_interpreter(tmp_path: Path, body: str) -> envs.Environment:
    return envs.Environment("tiny", Path(script(tmp_path / "python", f"#!/bin/sh\n{body}\n")))


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ('"python": "3.12.99", "ray": "2.55.1"', ["Python 3.12.99", "Python 3.12.1"]),
        ('"python": "3.12.1", "ray": "2.50.0"', ["Ray 2.50.0", "Ray 2.55.1"]),
        ('"python": "3.12.1"', ["Ray is not installed", "Ray 2.55.1"]),
    ],
)
def test_another_python_or_ray_is_refused_with_both_versions_named(tmp_path, reported, words):
    env = fake_interpreter(tmp_path, f"""echo '{{{reported}, "weightsync": "/x"}}'""")
    driver = {"python": "3.12.1", "ray": "2.55.1"}
    with pytest.raises(EnvError) as caught:
        envs.check_fits(env, Deadline(20, "test"), driver)
    for word in ["environment tiny", str(env.python), *words]:
        assert word in str(caught.value)


def test_a_fitting_environment_comes_back_with_its_versions(tmp_path):
    env = fake_interpreter(tmp_path, f"""echo '{{"python": "{HERE}", "ray": "9", "weightsync": "/x"}}'""")
    fitting = envs.check_fits(env, Deadline(20, "test"), {"python": HERE, "ray": "9"})
    assert fitting.versions == {"python": HERE, "ray": "9", "weightsync": "/x"}


def test_this_interpreter_reports_what_this_process_sees():
    env = envs.Environment("here", Path(sys.executable), pythonpath=(str(ROOT),))
    seen = envs.check_fits(env, Deadline(30, "test")).versions
    assert seen == envs.library_versions()
    assert seen["python"] == HERE
    assert seen["weightsync"] == str(ROOT / "weightsync")


def test_an_environment_without_weightsync_is_refused(root):
    env = envs.ensure("tiny", root=root)
    with pytest.raises(EnvError, match="weightsync cannot be imported in it"):
        envs.check_fits(env, Deadline(30, "test"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exec sleep 600", "gave no answer within 0.5 s"),
        ("echo 'ModuleNotFoundError: encodings' >&2; exit 1", r"does not work \(exit status 1\).*encodings"),
        ("echo hello", "does not work"),
        ("exit 0", "does not work"),
    ],
)
def test_an_interpreter_that_does_not_answer_is_an_error_within_seconds(tmp_path, body, words):
    start = time.monotonic()
    with pytest.raises(EnvError, match=words):
        envs.check_fits(fake_interpreter(tmp_path, body), Deadline(0.5, "test"))
    assert time.monotonic() - start < 5


def test_a_missing_interpreter_is_an_error_within_seconds(root):
    start = time.monotonic()
    with pytest.raises(EnvError, match=r"cannot be run: No such file.*uv sync --project .*tiny"):
        envs.check_fits(envs.resolve("tiny", root=root), Deadline(60, "test"))
    with pytest.raises(EnvError, match=r"/no/such/python cannot be run: No such file.*envs\.x\.python"):
        envs.check_fits(envs.resolve("x", EnvConfig(python="/no/such/python")), Deadline(60, "test"))
    assert time.monotonic() - start < 5


# ------------------------------------------------------------------------------------------------ starting processes


def run_as_ray_does(environment: envs.Environment, code: str) -> str:
    """What Ray's worker starter does: the value as it is, in bash, after ``exec``."""
    command = f"exec {envs.py_executable(environment)} -c {shlex.quote(code)}"
    variables = os.environ | {"PYTHONPATH": "/the/drivers"}
    return subprocess.check_output(["bash", "-c", command], text=True, env=variables, timeout=30).strip()


SHOW_PYTHONPATH = "import os; print(os.environ.get('PYTHONPATH'))"


def test_py_executable_gives_exactly_the_pythonpath_of_the_environment(root, tmp_path):
    odd = [str(tmp_path / "with space"), str(tmp_path / "with'quote")]
    named = envs.resolve("tiny", EnvConfig(python=sys.executable, pythonpath=odd))
    assert run_as_ray_does(named, SHOW_PYTHONPATH) == ":".join(odd)
    built = envs.ensure("tiny", root=root)
    assert run_as_ray_does(built, SHOW_PYTHONPATH) == "None"
    assert run_as_ray_does(built, "import sys; print(sys.prefix)") == str(built.project / ".venv")
    inherits = envs.resolve("tiny", EnvConfig(python=sys.executable))
    assert run_as_ray_does(inherits, SHOW_PYTHONPATH) == "/the/drivers"


def test_process_env_says_the_same(root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/the/drivers")
    monkeypatch.setenv("VIRTUAL_ENV", "/the/drivers/.venv")
    built = envs.process_env(envs.resolve("tiny", EnvConfig(env={"A": "b"}), root=root))
    assert "PYTHONPATH" not in built
    assert "VIRTUAL_ENV" not in built
    assert built["A"] == "b"
    named = envs.resolve("tiny", EnvConfig(python=sys.executable, pythonpath=["/x", "/y"]))
    assert envs.process_env(named)["PYTHONPATH"] == "/x:/y"


@pytest.mark.timeout(180)
def test_a_ray_actor_starts_in_the_environment(tmp_path):
    """A real Ray worker, in an interpreter that the configuration names, with a PYTHONPATH that has a space."""
    import ray

    (tmp_path / "only here").mkdir()
    (tmp_path / "only here" / "only_here.py").write_text("answer = 42\n")
    config = EnvConfig(python=sys.executable, pythonpath=[str(tmp_path / "only here"), str(ROOT)], env={"MARK": "set"})
    environment = envs.check_fits(envs.resolve("tiny", config), Deadline(60, "test"))

    class Reporter:
        def report(self) -> list:
            import only_here

            return [only_here.answer, os.environ["MARK"], os.environ["PYTHONPATH"], sys.executable]

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        actor = ray.remote(Reporter).options(num_cpus=0, runtime_env=envs.runtime_env(environment)).remote()
        answer, mark, pythonpath, python = ray.get(actor.report.remote(), timeout=120)
    finally:
        ray.shutdown()
    assert (answer, mark, pythonpath) == (42, "set", ":".join(environment.pythonpath))
    assert python == sys.executable


# -------------------------------------------------------------------------------------- the checkout's own projects


def own_projects() -> list[Path]:
    return [ROOT / "envs" / name for name in envs.names()]


def requirements(project: Path) -> dict:
    return tomllib.loads((project / "pyproject.toml").read_text())["project"]


def locked(project: Path) -> dict[str, dict]:
    packages = tomllib.loads((project / "uv.lock").read_text())["package"]
    return {package["name"]: package for package in packages}


def squeezed(requirement: str) -> str:
    return requirement.replace(" ", "").replace("'", '"').lower()


@pytest.mark.parametrize("project", own_projects(), ids=lambda p: p.name)
def test_locks_follow_the_projects(project):
    """Every requirement is in the lock as it is written, for the environment and for weightsync in it."""
    for where, name in ((project, requirements(project)["name"]), (ROOT, "weightsync")):
        declared = {squeezed(r).partition("[")[0] for r in requirements(where)["dependencies"] if "weightsync" not in r}
        entries = locked(project)[name]["metadata"]["requires-dist"]
        in_lock = {squeezed(e["name"] + e.get("specifier", "")) for e in entries}
        assert declared <= in_lock, f"{project.name}: run make lock"


@pytest.mark.parametrize("project", [ROOT, *own_projects()], ids=lambda p: p.name)
def test_ray_is_one_version_everywhere(project):
    versions = {locked(p)["ray"]["version"] for p in (ROOT, project) if "ray" in locked(p)}
    assert len(versions) == 1


def test_trainer_engine_and_driver_are_really_apart():
    assert "torch" not in locked(ROOT)
    trainer, engine, actor = (locked(ROOT / "envs" / n) for n in ("automodel", "sglang_cpu", "sgl_dtensor_v2"))
    assert trainer["torch"]["version"] != engine["torch"]["version"]
    assert trainer["transformers"]["version"] != engine["transformers"]["version"]
    assert "sglang" not in trainer
    assert "nemo-automodel" not in engine
    assert not {"sglang", "nemo-automodel"} & set(actor)
