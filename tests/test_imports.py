"""Which module may import what. Read from the source, so it also holds for libraries that are not installed here."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "weightsync"
STANDARD = set(sys.stdlib_module_names) | {"__future__"}

# What every process of ours has: the package's own dependencies.
BASE = {"msgspec", "yaml", "zmq"}
CUDA = {"torch", "triton", "cupy", "cuda"}
ENGINES, TRAINERS = {"sglang", "sgl_kernel", "vllm"}, {"nemo_automodel", "megatron", "mbridge"}

# Modules that each process starts from, and all that they may pull in when they are imported.
PROCESSES = {
    "driver": (["__init__", "cli", "doctor", "envs", "ray_channel", "sync"], BASE | {"rich", "typer"}),
    "served actor": (["serve", "actors.sgl_dtensor_v2", "actors.sgl_megatron"], BASE),
    "nouns": (["spec", "config", "errors", "plan", "rpc", "deadline", "versions"], BASE),
    "actor's session": (["session"], BASE | CUDA | {"h11", "httpcore"}),
    "training worker": (["publisher", "trainers.dtensor_v2", "trainers.megatron"], BASE | CUDA),
    "engine": (["receiver"], BASE | CUDA),
    "the demo's model writer": (["demo_model"], BASE),
}

# Modules that may import a library of an engine or a trainer, and then inside a function or at their top.
MAY_TOUCH = {
    "demo.trainer": {"nemo_automodel"},
    "demo.megatron_trainer": {"megatron"},
}


def modules() -> dict[str, Path]:
    """By name below the package: ``plan``, ``transports.shm``, ``transports`` (its ``__init__``), ``__init__``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(node: ast.AST, *, also_inside_functions: bool) -> set[str]:
    """Dotted names that ``node`` imports: for ``from a import b`` both ``a`` and ``a.b``, whichever is a module."""
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            names |= {child.module or ""} | {f"{child.module}.{alias.name}" for alias in child.names}
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif also_inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names |= imports(child, also_inside_functions=also_inside_functions)
    return names


@cache
def imports_of(module: str, *, also_inside_functions: bool = False) -> frozenset[str]:
    tree = ast.parse(MODULES[module].read_text())
    return frozenset(imports(tree, also_inside_functions=also_inside_functions))


def own(names: frozenset[str]) -> set[str]:
    below = {n.removeprefix("weightsync.") for n in names if n.startswith("weightsync.")}
    return {name for name in below if name in MODULES}


def foreign(names: frozenset[str]) -> set[str]:
    return {n.partition(".")[0] for n in names} - STANDARD - {"weightsync", ""}


def pulled_in(starts: list[str]) -> dict[str, str]:
    """Libraries imported when ``starts`` are imported, each with the chain of ours that leads to it."""
    chains = {start: start for start in (*starts, "__init__")}
    waiting, libraries = list(chains), {}
    while waiting:
        module = waiting.pop()
        names = imports_of(module)
        for library in foreign(names):
            libraries.setdefault(library, f"{chains[module]} -> {library}")
        parents = {module.rpartition(".")[0]} & set(MODULES)
        for other in (own(names) | parents) - set(chains):
            chains[other] = f"{chains[module]} -> {other}"
            waiting.append(other)
    return libraries


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_pulls_in_only_what_its_environment_has(process):
    starts, allowed = PROCESSES[process]
    libraries = pulled_in(starts)
    assert not {name: chain for name, chain in libraries.items() if name not in allowed}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_engines_and_trainers_libraries_are_touched_only_where_named(module):
    touched = foreign(imports_of(module, also_inside_functions=True)) & (ENGINES | TRAINERS)
    assert touched <= MAY_TOUCH.get(module, set())


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_library_of_one_process_is_not_loaded_at_the_top_of_a_module(module):
    """Ray, engines and trainers are imported in the function that needs them, wherever that is."""
    at_top = foreign(imports_of(module)) & ({"ray", "transformers"} | ENGINES | TRAINERS)
    assert not at_top - MAY_TOUCH.get(module, set())


def importable_by_the_driver() -> list[str]:
    starts, _ = PROCESSES["driver"]
    return [f"weightsync.{name}" if name != "__init__" else "weightsync" for name in starts]


def test_measured_the_driver_loads_no_torch_and_importing_does_no_work():
    code = (
        "import importlib, json, os, sys, threading\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        f"for name in {importable_by_the_driver()!r}:\n    importlib.import_module(name)\n"
        "print(json.dumps({'modules': sorted({n.partition('.')[0] for n in sys.modules}),"
        " 'threads': threading.active_count(), 'tasks': len(os.listdir('/proc/self/task')),"
        " 'opened': len(set(os.listdir('/proc/self/fd')) - before)}))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    seen = json.loads(out.stdout)
    assert not set(seen["modules"]) & (CUDA | ENGINES | TRAINERS | {"ray", "httpcore", "transformers"})
    assert "weightsync" in seen["modules"]
    assert (seen["threads"], seen["tasks"], seen["opened"]) == (1, 1, 0)


def test_no_environment_variable_is_read_below_the_configuration():
    """Only what starts other processes hands variables on, and only what a library reads itself is set."""
    texts = {name: path.read_text() for name, path in MODULES.items()}
    readers = {name for name, text in texts.items() if "os.environ" in text or "getenv" in text}
    allowed = {"envs", "builds", "ray_channel", "engines.local", "demo.run", "demo.trainer", "demo.torchrun"}
    allowed |= {
        "transports.sender",
        "transports.nccl_versions",
        "transports.rendezvous",
    }  # what NCCL reads: set, and shown
    assert readers <= allowed, readers - allowed


def test_every_module_is_reached_by_what_this_test_knows():
    """A module that no process starts from or imports is dead, or a process is missing above."""
    known = {name for starts, _ in PROCESSES.values() for name in starts}
    waiting, seen = list(known), set(known)
    while waiting:
        for other in own(imports_of(waiting.pop(), also_inside_functions=True)) - seen:
            seen.add(other)
            waiting.append(other)
    seen |= {name.rpartition(".")[0] for name in seen}
    by_name = {"demo", "transports", "trainers", "actors"}  # imported by a name made at run time, or run with -m
    assert {name for name in set(MODULES) - seen if name.partition(".")[0] not in by_name} == set()
