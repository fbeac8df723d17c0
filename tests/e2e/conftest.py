"""The real servers and training ranks that end-to-end tests share. Tests of one kind of server run together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.training import Training
from tests.servers import Kind, Servers

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ends_server: kills its server, so it runs last of those that share it")


@pytest.hookimpl(trylast=True)  # pytest sorts by fixture scopes first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every kind of server is started once: its tests run together, those that want none at the end."""
    ours = [item for item in items if HERE in item.path.parents]
    order = list(dict.fromkeys(kind for kind in map(_kind, ours) if kind is not None))
    places = {kind: i for i, kind in enumerate(order)}
    arranged = iter(
        sorted(ours, key=lambda i: (places.get(_kind(i), len(order)), i.get_closest_marker("ends_server") is not None))
    )
    items[:] = [next(arranged) if HERE in item.path.parents else item for item in items]


def _kind(item: pytest.Item) -> Kind | None:
    """A Kind that the test is parametrised with, else the module's ``KIND``."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    own = getattr(item.getparent(pytest.Module).obj, "KIND", None)
    return next((value for value in values if isinstance(value, Kind)), own)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    training = Training(tmp_path_factory.mktemp("training") / "store")
    yield training
    training.close()
