"""The command ``weightsync``. Each command imports what it needs; this file only parses and prints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightsync.errors import WeightSyncError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Bring a trainer's weights into running engines.")
console = Console()

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="A YAML configuration.")]


@contextlib.contextmanager
def errors_end_it() -> Iterator[None]:
    """An error of ours is one line on stderr and exit status 1, not a traceback."""
    try:
        yield
    except WeightSyncError as e:
        Console(stderr=True).print(f"[red]{type(e).__name__}[/]: {escape(str(e))}", soft_wrap=True)
        raise typer.Exit(1) from e


@app.command()
def build(
    names: Annotated[list[str], typer.Argument(help="NAME, or NAME:GROUP[,GROUP] with dependency groups.")],
) -> None:
    """Build environments of this checkout (envs/NAME), as they are also built when first needed."""
    from weightsync import envs

    with errors_end_it():
        for wanted in names:
            name, _, groups = wanted.partition(":")
            envs.ensure(name, groups=[g for g in groups.split(",") if g], progress=lambda line: print(line, flush=True))
            print(f"{name}: ready", flush=True)


@app.command()
def doctor(config: ConfigOption = None) -> None:
    """Show environments, versions and hardware, and what does not fit. Exit status 1 if something does not."""
    from weightsync import doctor as doctors
    from weightsync.config import load_config

    with errors_end_it():
        health = doctors.examine(load_config(config) if config else None)
    table = Table("environment", "state", "versions")
    table.add_row("(this process)", "", _versions(health.driver))
    for environment in health.environments:
        table.add_row(environment.name, environment.state, _versions(environment.versions))
    console.print(table)
    for gpu in health.gpus:
        console.print(f"GPU: {gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}")
    if not health.gpus:
        console.print("no NVIDIA GPU")
    console.print(f"/dev/shm: {health.shm_free_bytes >> 20} of {health.shm_total_bytes >> 20} MiB free")
    for problem in health.problems:
        console.print(f"[red]problem[/]: {escape(problem)}", soft_wrap=True)
    if health.problems:
        raise typer.Exit(1)
    console.print("no problems found")


def _versions(found: dict[str, str]) -> str:
    """All but where weightsync lies."""
    return ", ".join(f"{name} {version}" for name, version in found.items() if name != "weightsync")
