"""Which node the actor goes to under Ray, and which further nodes get a node actor. Pure; runs in the driver.

What the configuration says is taken as it is. Where it says nothing, a cluster of several nodes is read from the
publishers' addresses: the actor goes to the node of the first training rank, and for route ``nccl`` every other node
with training ranks gets a node actor. Ray marks each node with a resource ``node:ADDRESS``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from weightsync.addresses import bind_host, split_address
from weightsync.config import Config, NodeActorConfig, PlacementConfig
from weightsync.errors import ConfigError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY_OF_IT = 0.001


class Placed(NamedTuple):
    """``actor``: where the actor goes; ``at_driver``: to the driver's own node, whatever ``actor`` says nothing of.

    ``node_actors`` are complete: those without an address are to be started.
    """

    actor: PlacementConfig
    at_driver: bool
    node_actors: list[NodeActorConfig]


def place(config: Config, nodes: Collection[str]) -> Placed:
    """``nodes``: the addresses of the cluster's nodes. Raises ConfigError where a loopback address cannot do."""
    hosts = list(dict.fromkeys(_host_of(address) for address in config.publishers))
    chosen = bool(config.placement.resources or config.placement.labels)
    first = next(iter(hosts), "")
    actor, at_driver = config.placement, False
    if not chosen and config.source == "mapped" and len(nodes) > 1:
        at_driver = first not in nodes
        actor = PlacementConfig() if at_driver else PlacementConfig(resources={f"node:{first}": _ANY_OF_IT})
    node_actors = list(config.node_actors)
    others = [host for host in hosts[1:] if host in nodes and host not in _LOOPBACK]
    if not node_actors and not chosen and config.route == "nccl" and config.source == "mapped":
        node_actors = [NodeActorConfig(resources={f"node:{host}": _ANY_OF_IT}) for host in others]
        if node_actors and bind_host(config.bind_host) in _LOOPBACK:
            raise ConfigError(
                f"bind_host {config.bind_host} is reached by this machine alone, and training ranks are on "
                f"{', '.join(hosts)}: set it to 0.0.0.0 or ::"
            )
    return Placed(actor, at_driver, node_actors)


def options(resources: dict[str, float], labels: dict[str, str]) -> dict[str, Any]:
    """Ray's options for an actor or task on a node with these."""
    wanted: dict[str, Any] = {"num_cpus": 0}
    if resources:
        wanted["resources"] = dict(resources)
    if labels:
        wanted["label_selector"] = dict(labels)
    return wanted


def with_addresses(config: Config, node_actors: list[NodeActorConfig], addresses: list[str]) -> Config:
    """``config`` with every node actor's address: those that it had, and ``addresses`` for the others in order."""
    started = iter(addresses)
    complete = [one if one.address else msgspec.structs.replace(one, address=next(started)) for one in node_actors]
    return msgspec.structs.replace(config, node_actors=complete)


def _host_of(address: str) -> str:
    return split_address(address)[0].removeprefix("tcp://").rpartition(":")[0].strip("[]")
