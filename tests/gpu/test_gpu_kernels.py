"""Copies and fingerprints by the kernels on a GPU, against torch and against the CPU's fingerprint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from weightsync import fingerprint_cuda
from weightsync.fingerprint import fingerprint
from weightsync.transports.cuda_copy import make_puller

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn, torch.int64]


def raw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits on the GPU, NaN payloads and negative zeros among them."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda").view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def views(whole: torch.Tensor) -> list[torch.Tensor]:
    """Of a [120, 544] tensor: what sharding and mapping produce, and what they should not but may."""
    cut = [whole[3:20, 5:100], whole[::3, ::2], whole[:, 16:48], whole[0], whole[2, 3], whole[:0]]
    return [whole, whole.t(), *cut, whole.view(5, 24, 4, 136).permute(2, 0, 3, 1), whole.view(-1)[7:60000]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprints_equal_the_cpus(dtype: torch.dtype) -> None:
    items = [(view, tuple(range(11, 11 + view.dim()))) for view in views(raw((120, 544), dtype))]
    expected = [fingerprint(view.cpu(), origin) for view, origin in items]
    assert fingerprint_cuda.fingerprint_many(items) == expected


def test_prepared_fingerprints_read_memory_as_it_is() -> None:
    x = raw((1000, 768), torch.bfloat16)
    prepared = fingerprint_cuda.Fingerprints([(x, (4, 0)), (x[:, :8].t(), (0, 9))])
    before = prepared.run()
    x[999, 7].view(torch.int16).bitwise_xor_(1)
    after = prepared.run()
    assert after == [fingerprint(x.cpu(), (4, 0)), fingerprint(x[:, :8].t().cpu(), (0, 9))]
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_parts_sum_to_the_whole() -> None:
    x = raw((300, 2000), torch.bfloat16)
    parts = [(x[:100], (0, 0)), (x[100:, :900], (100, 0)), (x[100:, 900:], (100, 900))]
    total = sum(fingerprint_cuda.fingerprint_many(parts)) % (1 << 64)
    assert fingerprint_cuda.fingerprint_many([(x, (0, 0))]) == [total]


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_fingerprint_of_a_cast_is_that_of_torchs_cast(source: torch.dtype, target: torch.dtype) -> None:
    for view in views(raw((120, 544), source)):
        origin = (5,) * view.dim()
        expected = fingerprint_cuda.fingerprint_many([(view.to(target), origin)])
        assert fingerprint_cuda.fingerprint_many([(view, origin)], target) == expected


def test_other_casts_are_made_by_torch() -> None:
    x = torch.randint(-5, 5, (30, 40), device="cuda")
    assert fingerprint_cuda.fingerprint_many([(x, (0, 0))], torch.float32) == [fingerprint(x.float().cpu(), (0, 0))]


@pytest.mark.parametrize("method", ["auto", "kernel", "batch", "streams"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_equal_to_the_byte(dtype: torch.dtype, method: str) -> None:
    sources = views(raw((120, 544), dtype))
    room = [torch.zeros(s.numel() + 67, dtype=dtype, device="cuda") for s in sources]
    pairs = [(r[3 : 3 + s.numel()].view(s.shape), s) for r, s in zip(room, sources, strict=True)]
    pairs += [(r.new_zeros(s.shape), s) for r, s in zip(room, sources, strict=True)]
    puller = make_puller(pairs, method=method)
    assert puller.run() > 0
    for target, source in pairs:
        assert torch.equal(bits(target), bits(source))
    for r, s in zip(room, sources, strict=True):
        assert not bits(r[:3]).any(), "wrote before"
        assert not bits(r[3 + s.numel() :]).any(), "wrote after"


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
def test_casting_copies_round_as_torch_does(target: torch.dtype) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        sources = views(raw((120, 544), dtype))
        pairs = [(torch.zeros(s.shape, dtype=target, device="cuda"), s) for s in sources]
        make_puller(pairs).run()
        for to, source in pairs:
            assert torch.equal(bits(to), bits(source.to(target)))


def test_transposed_experts_take_one_launch() -> None:
    experts = raw((8, 256, 384), torch.bfloat16)
    target = torch.zeros(8, 384, 256, dtype=torch.bfloat16, device="cuda")
    pairs = [(target[e, half], experts[e][:, half].t()) for e in range(8) for half in (slice(0, 192), slice(192, 384))]
    puller = make_puller(pairs)
    puller.run()
    assert puller.num_launches == 1
    assert torch.equal(bits(target), bits(experts.transpose(1, 2)))


def test_large_pieces_and_small_ones_are_one_run() -> None:
    sources = [raw((n,), torch.uint8) for n in (100, 8 << 20, (8 << 20) + 5, 1 << 20)]
    pairs = [(torch.zeros_like(s), s) for s in sources]
    puller = make_puller(pairs)
    puller.run()
    assert puller.num_bytes == sum(s.numel() for s in sources)
    for target, source in pairs:
        assert torch.equal(target, source)


def test_copies_go_on_after_their_start_and_what_is_queued_behind_comes_after_them() -> None:
    sources = [raw((n,), torch.uint8) for n in (100, 4 << 30, (1 << 30) + 5, 1 << 20)]
    pairs = [(torch.zeros_like(s), s) for s in sources]
    puller = make_puller(pairs)
    puller.run()
    for target, _ in pairs:
        target.zero_()
    finish = puller.start()
    behind = torch.cuda.Event()
    last = [target[-4:].clone() for target, _ in pairs]
    behind.record()
    assert not behind.query(), "5 GiB were copied before start returned"
    with ThreadPoolExecutor(1) as beside:
        assert beside.submit(finish).result() > 0
    assert all(torch.equal(target, source) for target, source in pairs)
    assert all(torch.equal(seen, source[-4:]) for seen, (_, source) in zip(last, pairs, strict=True))


def test_copies_share_few_streams_however_many_there_are() -> None:
    """Torch hands out 32 a device in turns: a group's could be among them, and a copy wait behind its broadcast."""
    pairs = [(torch.zeros(8 << 20, dtype=torch.uint8, device="cuda"), raw((8 << 20,), torch.uint8)) for _ in range(12)]
    pullers = [make_puller([pair]) for pair in pairs]
    streams = {s.cuda_stream for puller in pullers for step in puller._steps for s in step._streams}  # type: ignore[union-attr]
    assert len(streams) <= 4


def test_a_thread_that_never_touched_the_gpu_makes_and_runs_copies() -> None:
    """Servers answer in threads; the driver's calls want a context that is current in theirs."""
    source = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8, device="cuda")
    targets = [torch.zeros_like(source) for _ in range(3)]
    torch.cuda.synchronize()
    pullers = []
    steps = [
        lambda: pullers.append(make_puller([(targets[0], source)])),
        lambda: pullers[0].run(),
        lambda: make_puller([(targets[1], source)]).run(alone=False),
    ]
    pullers.append(make_puller([(targets[2], source)]))
    steps.append(lambda: pullers.pop().run(alone=False))
    for step in steps[3:] + steps[:3]:
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(step).result()
    assert all(torch.equal(target, source) for target in targets)


def test_nothing_to_do_does_nothing() -> None:
    assert make_puller([]).run() == 0.0
    assert fingerprint_cuda.fingerprint_many([]) == []
