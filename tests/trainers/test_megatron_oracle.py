"""What the Megatron reader gives, planned to an engine and copied, against what mbridge exports of the same models.

Both run in envs/megatron, apart: mbridge in a process that cannot import weightsync, ours afterwards on what it loaded.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

from weightsync import envs
from weightsync.boxes import dense_strides, whole
from weightsync.config import Config
from weightsync.plan import build_plan
from weightsync.sources import map_sources
from weightsync.spec import Layout, Need, Param, Rule, Shard, View

WORLD_SIZE = 4
SCRIPTS = Path(__file__).parent.parent / "trainer_side"
FORMS = {
    "llama": ("te", "local", "hybrid"),
    "qwen2_tied": ("te", "local", "hybrid"),
    "qwen3_wide": ("te", "local", "hybrid"),
    "qwen3_virtual": ("te", "local"),
    "qwen3_moe": ("te", "local", "hybrid"),
    "mixtral": ("te", "local"),
    "deepseek_v3": ("te", "local"),
}
CASES = [(case, form) for case, forms in FORMS.items() for form in forms]


class Ranks:
    """What the readers of all ranks gave. ``elements``: by rank, one dense tensor a shard."""

    def __init__(self, folder: Path, form: str) -> None:
        saved = [torch.load(folder / f"{form}.rank{r}.pt", weights_only=True) for r in range(WORLD_SIZE)]
        decode = msgspec.msgpack.decode
        self.shards = {r: decode(s["shards"], type=list[Shard]) for r, s in enumerate(saved)}
        self.elements = [s["elements"] for s in saved]
        self.rules = list(dict.fromkeys(rule for s in saved for rule in decode(s["rules"], type=list[Rule])))

    def view(self, rank: int, shard: int, offset: int, size: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        return torch.as_strided(self.elements[rank][shard], size, strides, offset)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with mbridge's answers and ours, a folder a case."""
    out = tmp_path_factory.mktemp("megatron")
    environment = envs.resolve("megatron")
    for script in ("megatron_oracle.py", "megatron_subject.py"):
        log = out / f"{script}.log"
        with open(log, "wb") as file:
            command = [environment.python, str(SCRIPTS / script), str(out)]
            done = subprocess.run(
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=file, timeout=600
            )
        assert done.returncode == 0, f"{script}:\n" + log.read_text()[-4000:]
    return out


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("case", "form"), CASES)
def test_what_an_engine_gets_is_what_mbridge_exports(oracle: Path, case: str, form: str) -> None:
    expected = torch.load(oracle / case / "expected.pt", weights_only=True)
    ranks = Ranks(oracle / case, form)

    received = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
    plan = build_plan(
        ranks.shards,
        ranks.rules,
        {"engine": [_engine(expected)]},
        config=Config(pair="sgl_megatron"),
        source_devices=dict.fromkeys(range(WORLD_SIZE), ""),
    )
    for copy in plan.rank_plan("engine", 0).copies:
        slices = tuple(slice(o, o + n) for o, n in zip(copy.box.offset, copy.box.size, strict=True))
        source = ranks.view(copy.rank, copy.source.storage, copy.source.offset, copy.box.size, copy.source.strides)
        received[copy.tensor][slices] = source

    wrong = [name for name in expected if not torch.equal(received[name], expected[name])]
    assert not wrong, wrong[:5]


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("case", "form"), CASES)
def test_replicas_hold_the_same_and_nothing_is_left_over(oracle: Path, case: str, form: str) -> None:
    expected = torch.load(oracle / case / "expected.pt", weights_only=True)
    ranks = Ranks(oracle / case, form)

    sources = map_sources(ranks.shards, ranks.rules, [], [])

    assert not sources.unmapped
    assert {n: (tuple(t.shape), str(t.dtype)) for n, t in expected.items()} == {
        n: (s.spec.shape, f"torch.{s.spec.dtype}") for n, s in sources.tensors.items()
    }
    replicas = 0
    for source in sources.tensors.values():
        for box, members in source.layout.groups:
            views = [ranks.view(m.rank, source.holders[m.holder].shard, m.offset, box.size, m.strides) for m in members]
            replicas += len(views) - 1
            assert all(torch.equal(views[0], v) for v in views[1:]), source.spec.name
    assert replicas, "norms at least are on every rank of a tensor-parallel group"


def test_first_and_last_stage_offer_a_tied_embedding_once(oracle: Path) -> None:
    ranks = Ranks(oracle / "qwen2_tied", "te")

    sources = map_sources(ranks.shards, ranks.rules, [], [])

    assert "lm_head.weight" not in sources.tensors
    embedding = sources.tensors["model.embed_tokens.weight"]
    assert embedding.spec.shape == (101, 40)
    assert [sorted(m.rank for m in group.members) for group in embedding.layout.groups] == [[0, 2], [1, 3]]


def test_the_router_bias_is_a_float32_buffer(oracle: Path) -> None:
    ranks = Ranks(oracle / "deepseek_v3", "te")

    biases = [s for s in ranks.shards[3] if s.tensor.endswith("expert_bias")]

    assert [(s.dtype, s.is_buffer, s.shape) for s in biases] == [("float32", True, (8,))] * 2


def _engine(tensors: dict[str, torch.Tensor]) -> Layout:
    """An engine rank that wants every tensor whole."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    params = [
        Param(name, shape, str(tensors[name].dtype).removeprefix("torch."), tensors[name].numel())
        for name, shape in shapes.items()
    ]
    needs = [
        Need(name, whole(shape), View(i, 0, dense_strides(shape))) for i, (name, shape) in enumerate(shapes.items())
    ]
    return Layout(
        rank=0,
        boot_id="boot",
        device="",
        host="",
        params=params,
        needs=needs,
        fills=[],
        constants=[],
        derived=[],
        opaque={},
        ignored=[],
        versions={},
    )
