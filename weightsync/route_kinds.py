"""A route by its name. Apart from ``routes`` because each kind imports that, and only those in use are imported."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.config import Config
from weightsync.fanout import Fanout
from weightsync.routes import PullRoute, Route
from weightsync.workers import Workers


def make_route(name: str, fanout: Fanout, config: Config, workers: Workers) -> Route:
    """The route of that name between these workers and the engines that it is prepared for."""
    from weightsync.routes_bucket import BucketRoute

    def by_bucket(select: Callable[[str], bool]) -> Route:
        return BucketRoute(fanout, config, workers.rules, select)

    if name == "nccl":
        from weightsync.routes_nccl import NcclRoute

        return NcclRoute(fanout, config, workers)
    return by_bucket(lambda tensor: True) if name == "bucket" else PullRoute(fanout, by_bucket, workers)
