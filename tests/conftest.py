"""Options and markers of the whole suite. No torch here: the driver's tests load this file too."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from weightsync.transports.sender import Nursery


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that skips itself fails, as `make test` wants it")
    parser.addoption("--results", default="", help="a folder in which GPU tests that measure write what they found")
    parser.addoption("--commit", default="", help="what those rows say of this checkout, where git is not there to ask")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One for all tests of a file: importing torch takes it seconds."""
    from weightsync.transports.sender import Nursery

    one = Nursery()
    yield one
    one.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; left out (not skipped) where there is none")
    config.addinivalue_line("markers", "two_gpus: needs two of them; left out where there is one")
    config.addinivalue_line("markers", "netns: makes network namespaces; left out where this user may not")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = ["gpu", "two_gpus"][_num_gpus() :]
    if any(item.get_closest_marker("netns") for item in items) and not _may_make_namespaces():
        missing.append("netns")
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in missing)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _num_gpus() -> int:
    """That tests may use; 0 without a driver, where torch need not be there either."""
    if not shutil.which("nvidia-smi"):
        return 0
    import torch

    return torch.cuda.device_count()


def _may_make_namespaces() -> bool:
    if not shutil.which("ip"):
        return False
    probe = ["unshare", "--net", "--uts", "ip", "link", "add", "wsx", "type", "veth", "peer", "name", "wsy"]
    try:
        made = subprocess.run(probe, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return os.geteuid() == 0 and made.returncode == 0


def _skip_is_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --no-skips forbids it: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if item.config.getoption("no_skips"):
        _skip_is_failure(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if collector.config.getoption("no_skips"):
        _skip_is_failure(report)
    return report
