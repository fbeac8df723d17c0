"""Shared memory between unrelated processes, what is left when they end, and the copies from it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import transports
from weightsync.errors import ConfigError, TransferError
from weightsync.spec import Segment
from weightsync.transports import shm


def python(code: str, *args: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run code in a process that shares nothing with this one but the machine."""
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=check)


@pytest.fixture
def memory():
    memory = shm.allocate(1024)
    yield memory
    memory.close()


def path_of(memory) -> str:
    return os.fsdecode(memory.segment.handle)


def test_an_unrelated_process_reads_what_the_owner_writes_and_the_owner_what_it_writes(memory):
    memory.tensor.copy_(torch.arange(1024) % 251)
    run = python(
        """
        import os, sys
        from weightsync.spec import Segment
        from weightsync.transports import shm
        memory = shm.open_segment(Segment("shm", os.fsencode(sys.argv[1]), 1024))
        print(int(memory.tensor.long().sum()))
        memory.tensor[7] = 99
        memory.close()
        """,
        path_of(memory),
    )
    assert int(run.stdout) == int((torch.arange(1024) % 251).sum())
    assert int(memory.tensor[7]) == 99
    assert os.path.exists(path_of(memory)), "a consumer that closes leaves the owner's file"


def test_new_memory_is_zero_and_named_by_its_owner(memory):
    assert int(memory.tensor.long().sum()) == 0
    assert f"-{os.getpid()}-" in path_of(memory)
    assert memory.segment == Segment("shm", memory.segment.handle, 1024)
    assert isinstance(memory, transports.Memory)


def test_close_removes_the_file_and_views_stay_readable():
    memory = shm.allocate(64)
    view, path = memory.tensor[:4], path_of(memory)
    view.fill_(5)
    memory.close()
    memory.close()
    assert not os.path.exists(path)
    assert view.tolist() == [5, 5, 5, 5]


def test_memory_that_is_dropped_or_left_open_at_exit_is_removed():
    path = path_of(shm.allocate(64))
    assert not os.path.exists(path)
    run = python(
        """
        import os
        from weightsync.transports import shm
        memory = shm.allocate(64)
        print(os.fsdecode(memory.segment.handle))
        """
    )
    assert run.stdout.strip()
    assert not os.path.exists(run.stdout.strip())


def test_a_forked_child_does_not_remove_its_parents_memory(memory):
    child = os.fork()
    if child == 0:
        memory.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.path.exists(path_of(memory))


def test_a_killed_owner_leaves_a_file_that_the_next_one_sweeps(memory):
    run = python(
        """
        import os, signal
        from weightsync.transports import shm
        memory = shm.allocate(64)
        print(os.fsdecode(memory.segment.handle), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        check=False,
    )
    left = run.stdout.strip()
    assert os.path.exists(left)
    assert os.path.basename(left) in shm.sweep()
    assert not os.path.exists(left)
    assert os.path.exists(path_of(memory)), "the file of a living owner stays"


def test_a_process_id_used_again_does_not_keep_a_dead_owners_file(memory):
    namespace, pid, _, _ = os.path.basename(path_of(memory)).removeprefix("weightsync-").split("-")
    old = shm.FOLDER / f"weightsync-{namespace}-{pid}-1-aa"
    other_namespace = shm.FOLDER / f"weightsync-1-{pid}-1-aa"
    for path in (old, other_namespace):
        path.write_bytes(b"x")
    try:
        swept = shm.sweep()
        assert old.name in swept
        assert other_namespace.name not in swept
        assert other_namespace.exists()
    finally:
        other_namespace.unlink()


def test_no_room_is_an_error_with_sizes_and_leaves_no_file():
    before = set(os.listdir(shm.FOLDER))
    with pytest.raises(TransferError) as full:
        shm.allocate(1 << 50)
    assert str(1 << 50) in str(full.value)
    assert "free" in str(full.value)
    assert not [n for n in set(os.listdir(shm.FOLDER)) - before if f"-{os.getpid()}-" in n]


def test_memory_that_is_gone_too_short_or_not_ours_is_refused(memory):
    gone = shm.allocate(64)
    gone.close()
    bad = {
        "gone": gone.segment,
        "1024": Segment("shm", memory.segment.handle, 4096),
        "not a shared memory file": Segment("shm", b"/etc/passwd", 4),
        "cuda_ipc": Segment("cuda_ipc", memory.segment.handle, 4),
    }
    for words, segment in bad.items():
        with pytest.raises(TransferError, match=words):
            shm.open_segment(segment)


def test_host_memory_cannot_be_exported_in_place():
    with pytest.raises(TransferError, match="arena"):
        shm.export(torch.zeros(4))


def test_transports_are_found_by_name():
    assert transports.get("shm") is shm
    with pytest.raises(ConfigError, match="shm, cuda_ipc"):
        transports.get("smoke")


def test_mapping_and_closing_many_times_leaves_no_descriptor_and_no_mapping(memory):
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum(path_of(memory) in line for line in maps)

    descriptors, mapped = len(os.listdir("/proc/self/fd")), mappings()
    for _ in range(20):
        opened = shm.open_segment(memory.segment)
        assert int(opened.tensor[0]) == 0
        opened.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mappings() == mapped


# ---------------------------------------------------------------------------------------------------- copying


def test_contiguous_neighbours_become_one_copy():
    source, target = torch.arange(60.0), torch.zeros(60)
    pairs = [(target[a:b].view(-1, 2), source[a:b].view(-1, 2)) for a, b in [(40, 60), (0, 10), (10, 40)]]
    puller = transports.make_puller(pairs)
    assert puller.num_copies == 1
    assert puller.num_bytes == 240
    assert puller.run() > 0
    assert torch.equal(target, source)


def test_neighbours_in_one_memory_only_stay_apart():
    source, target, other = torch.arange(20.0), torch.zeros(20), torch.zeros(20)
    puller = shm.make_puller([(target[:10], source[10:]), (target[10:], source[:10]), (other[:5], source[:5])])
    assert puller.num_copies == 3
    puller.run()
    assert torch.equal(target, torch.cat([source[10:], source[:10]]))
    assert torch.equal(other[:5], source[:5])


def test_bits_are_copied_as_they_are_and_other_dtypes_rounded():
    nans = torch.tensor([0x7FA00001, -1, -(1 << 31)], dtype=torch.int32).view(torch.float32)
    target, rounded = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
    values = torch.tensor([1.0, 1 / 3, -0.0])
    shm.make_puller([(target, nans), (rounded, values)]).run()
    assert torch.equal(target.view(torch.int32), nans.view(torch.int32))
    assert torch.equal(rounded.view(torch.int16), values.bfloat16().view(torch.int16))


def test_parameters_and_inference_tensors_can_be_written():
    parameter = torch.nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        inferred = torch.zeros(4)
    shm.make_puller([(parameter, torch.ones(4)), (inferred, torch.ones(4))]).run()
    assert parameter.tolist() == inferred.tolist() == [1.0] * 4


def test_nothing_to_copy_is_nothing():
    puller = shm.make_puller([(torch.zeros(0), torch.zeros(0))])
    assert (puller.num_bytes, puller.num_copies) == (0, 0)
    puller.run()


@st.composite
def scattered_copies(draw):
    """Equal-sized boxes of a source tensor and of a target, some of them neighbours, in any order."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=4))})
    spans = draw(st.permutations(list(itertools.pairwise(cuts))))
    transpose = draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    return rows, columns, spans, transpose


@settings(deadline=None, max_examples=60)
@given(scattered_copies(), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
def test_any_set_of_copies_moves_what_each_alone_would(case, dtype):
    rows, columns, spans, transpose = case
    source = (torch.arange(rows * columns) % 120).to(dtype).view(rows, columns)
    target = torch.zeros_like(source)
    pairs = [(target[a:b], source[a:b]) for a, b in spans]
    shm.make_puller([(t.t(), s.t()) if flip else (t, s) for (t, s), flip in zip(pairs, transpose)]).run()
    assert torch.equal(target, source)
