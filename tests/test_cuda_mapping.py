"""Mapping another process's GPU memory: once through each device, since kernels of another one cannot read there.

The driver is a stand-in; the real one is in ``tests/gpu/test_cuda_ipc.py`` and ``tests/gpu/test_relay.py``.
"""

from __future__ import annotations

import contextlib
import itertools

import msgspec
import pytest
import torch

from weightsync.errors import TransferError
from weightsync.spec import Segment
from weightsync.transports import cuda_ipc


class Driver:
    """Of one process with two GPUs. ``opened``: by address, the device through which; ``peers``: what it enabled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.opened: dict[int, int] = {}
        self.peers: list[tuple[int, int]] = []
        self.are_peers = True
        self._addresses = itertools.count(1 << 20, 1 << 20)
        driver = cuda_ipc.cuda_driver
        monkeypatch.setattr(driver, "on", self.on)
        monkeypatch.setattr(driver, "open_handle", self.open)
        monkeypatch.setattr(driver, "close_handle", self.opened.pop)
        monkeypatch.setattr(driver, "enable_peer_access", lambda index: self.peers.append((self.current, index)))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: self.are_peers)
        monkeypatch.setattr(cuda_ipc.devices, "device_of", lambda uuid: torch.device("cuda", int(uuid[-1])))
        monkeypatch.setattr(cuda_ipc.devices, "uuid_of", lambda device: f"GPU-{device.index}")
        monkeypatch.setattr(cuda_ipc, "_as_tensor", lambda address, nbytes: address)

    @contextlib.contextmanager
    def on(self, device: torch.device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def open(self, handle: bytes) -> int:
        address = next(self._addresses)
        self.opened[address] = self.current
        return address

    def mapped(self, segment: Segment, device: int) -> cuda_ipc.Memory:
        with self.on(torch.device("cuda", device)):
            return cuda_ipc.open_segment(segment)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(cuda_ipc, "_process", cuda_ipc._Process())
    return Driver(monkeypatch)


def segment(owner: bytes = b"another process") -> Segment:
    """On GPU 0."""
    handle = cuda_ipc.Handle(b"h" * 64, owner, 1, 4096, 7)
    return Segment(cuda_ipc.NAME, msgspec.msgpack.encode(handle), 64, "GPU-0")


def test_a_segment_is_mapped_once_through_each_device_and_unmapped_with_its_last_use(driver):
    one, again, peer = driver.mapped(segment(), 0), driver.mapped(segment(), 0), driver.mapped(segment(), 1)
    assert one.tensor == again.tensor != peer.tensor
    assert driver.opened == {one.tensor: 0, peer.tensor: 1}
    one.close()
    one.close()
    assert len(driver.opened) == 2
    again.close()
    assert driver.opened == {peer.tensor: 1}
    peer.close()
    assert not driver.opened and not cuda_ipc._process.mapped


def test_memory_of_this_process_is_not_mapped_but_another_device_is_let_in(driver):
    own = segment(cuda_ipc._process.token)
    assert driver.mapped(own, 0).tensor == 4096 and not driver.peers
    assert driver.mapped(own, 1).tensor == 4096 and driver.peers == [(1, 0)]
    assert not driver.opened


@pytest.mark.parametrize("owner", ["another", "this"])
def test_a_device_without_peer_access_is_named(driver, owner):
    driver.are_peers = False
    given = segment(cuda_ipc._process.token if owner == "this" else b"another process")
    with pytest.raises(TransferError, match="GPU-1 has no peer access to GPU-0: needs a relay"):
        driver.mapped(given, 1)
    assert not cuda_ipc._process.mapped
