"""The command ``weightsync``. Each command imports what it needs; this file only parses and prints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightsync.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.sync import WeightSync

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Bring a trainer's weights into running engines.")
console = Console()

ConfigArgument = Annotated[Path | None, typer.Argument(help="A YAML configuration.")]
PublishersOption = Annotated[Path | None, typer.Option(help="A file with the publishers' addresses, one a line.")]
ConnectOption = Annotated[str, typer.Option(help="Address of an actor that `weightsync serve` runs.")]
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


@app.command()
def demo(
    pair: Annotated[str, typer.Option(help="sgl_dtensor_v2 or sgl_megatron.")] = "sgl_dtensor_v2",
    pushes: Annotated[int, typer.Option(min=1, help="How often the weights are pushed.")] = 8,
) -> None:
    """Train a small model, push it into a real SGLang on the CPU, compare what both say. Status 1 if they differ."""
    from weightsync.demo.run import run

    with errors_end_it():
        run(pair=pair, pushes=pushes, console=console)


@app.command()
def plan(
    config: ConfigArgument = None,
    publishers: PublishersOption = None,
    connect: ConnectOption = "",
    topology: Annotated[
        Path | None, typer.Option(help="A made-up cluster in YAML: what a push would cost on it, link by link.")
    ] = None,
    links: Annotated[int, typer.Option(min=1, help="With --topology: so many links of each row, busiest first.")] = 3,
) -> None:
    """Show what a push would move, by which route, and what is not covered. Moves nothing."""
    if topology is not None:
        from weightsync import topology as topologies

        with errors_end_it():
            if config is not None or publishers is not None or connect:
                raise ConfigError("--topology describes a made-up cluster: give nothing but --links with it")
            print(topologies.explain(topologies.load_topology(topology), links=links), end="")
        return
    with errors_end_it(), _session(config, publishers, connect) as sync:
        print(sync.plan().explain())


@app.command()
def push(
    step: Annotated[int, typer.Argument(help="The step that every publisher has marked.")],
    config: ConfigArgument = None,
    publishers: PublishersOption = None,
    connect: ConnectOption = "",
    force: Annotated[bool, typer.Option(help="Push although the step is not newer.")] = False,
) -> None:
    """Push one step into every engine, and print the report as JSON."""
    import json

    with errors_end_it(), _session(config, publishers, connect) as sync:
        print(json.dumps(sync.push(step, force=force).to_dict(), indent=2))


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A YAML configuration.")],
    publishers: PublishersOption = None,
    count: Annotated[int, typer.Option(min=1, help="Wait for so many addresses in --publishers.")] = 1,
    address_file: Annotated[Path | None, typer.Option(help="Write the address for weightsync.connect here.")] = None,
    host: Annotated[str, typer.Option(help="Host to listen on.")] = "127.0.0.1",
) -> None:
    """Run the pair's actor as a plain process, without Ray. Run it in the pair's environment."""
    from weightsync import serve as serving
    from weightsync.config import load_config
    from weightsync.sync import with_peers

    with errors_end_it():
        loaded = load_config(config)
        if publishers is not None:
            addresses = serving.read_addresses(publishers, count, loaded.connect_timeout_s)
            loaded = with_peers(loaded, addresses, None)
        server = serving.start(loaded, host=host)
        if address_file is not None:
            serving.write_address(address_file, server.address)
        print(server.address, flush=True)
        serving.until_signalled(server)


@app.command()
def node(
    host: Annotated[str, typer.Option(help="Host to listen on, for the actor and for senders.")] = "0.0.0.0",
    host_name: Annotated[str, typer.Option(help="Whose training ranks it reads, if not this machine's name.")] = "",
    address_file: Annotated[Path | None, typer.Option(help="Write the address for `node_actors` here.")] = None,
) -> None:
    """Run a node actor, without Ray: route nccl sends from this trainer node through it. In the pair's environment."""
    from weightsync import serve as serving
    from weightsync.transports.node import NodeServer

    with errors_end_it():
        server = NodeServer(host_name=host_name, host=host)
    if address_file is not None:
        serving.write_address(address_file, server.address)
    print(server.address, flush=True)
    serving.until_signalled(server)


@app.command()
def bench(args: Annotated[list[str] | None, typer.Argument(help="Passed on to benchmarks.cpu_refit.")] = None) -> None:
    """Push about 1 GB through each CPU route, beside a memory copy and SGLang's own calls."""
    import subprocess

    from weightsync import envs

    with errors_end_it():
        environment = envs.ensure("sgl_dtensor_v2")
    command = [str(environment.python), "-m", "benchmarks.cpu_refit", *(args or [])]
    raise typer.Exit(subprocess.run(command, cwd=envs.project_root(), env=envs.process_env(environment)).returncode)


def _session(config: Path | None, publishers: Path | None, address: str) -> WeightSync:
    """A running actor at ``address``, or one started under Ray for this command."""
    import weightsync
    from weightsync.config import load_config

    if address:
        return weightsync.connect(address)
    if config is None:
        raise ConfigError("give a configuration, or --connect with the address of a served actor")
    loaded = load_config(config)
    try:
        listed = publishers.read_text().split() if publishers else loaded.publishers
    except OSError as e:
        raise ConfigError(f"--publishers {publishers}: {e.strerror}") from e
    return weightsync.launch(loaded, publishers=listed)


def _versions(found: dict[str, str]) -> str:
    """All but where weightsync lies."""
    return ", ".join(f"{name} {version}" for name, version in found.items() if name != "weightsync")
