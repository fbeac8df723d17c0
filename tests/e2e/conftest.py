"""The real servers that end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()
