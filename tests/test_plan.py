"""The planner, executed in numpy: whatever the layouts, the engine gets the trainer's bytes, or an error with names."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.weights import (
    DTYPE,
    FakeEngineRank,
    FakeTrainer,
    dense,
    execute,
    fingerprint,
    identity,
    plan_of,
    region_fingerprints,
    slices,
    view_of,
    whole,
)
from weightsync.config import RenameConfig
from weightsync.errors import PlanError
from weightsync.explain import floor_s
from weightsync.plan import PlanSummary, distinct_rules, needed_dtypes, offered
from weightsync.sources import map_sources
from weightsync.spec import Box, Description, Rule, Shard, TensorSpec


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**16, shape).astype(np.uint16)


def chunk(shape: tuple[int, ...], dim: int, rank: int, ranks: int, within: Box | None = None) -> Box:
    """torch.chunk's part of ``within`` (default: the whole tensor): uneven at the end, empty beyond it."""
    within = within or whole(shape)
    step = -(-within.size[dim] // ranks)
    low = min(rank * step, within.size[dim])
    offset, size = list(within.offset), list(within.size)
    offset[dim], size[dim] = offset[dim] + low, min(step, size[dim] - low)
    return Box(tuple(offset), tuple(size))


def whole_tensor_engine(**tensors: tuple[int, ...]) -> FakeEngineRank:
    rank = FakeEngineRank()
    for name, shape in tensors.items():
        rank.need(name, whole(shape), rank.param(name, shape))
    return rank


def one_tensor_trainer(full: np.ndarray, boxes: dict[int, Box], name: str = "w") -> FakeTrainer:
    trainer = FakeTrainer(max(boxes) + 1, rules=[identity(name, full.shape)])
    for rank, box in boxes.items():
        trainer.hold(rank, name, full, box)
    return trainer


# ---------------------------------------------------------------------------------------------------- properties


class World:
    """A random trainer and two random engines that hold the same Hugging Face tensors in other pieces."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.trainer = FakeTrainer(rng.randint(1, 4))
        self.tensors: dict[str, np.ndarray] = {}
        for i in range(rng.randint(1, 3)):
            rng.choice([self._permuted, self._stacked, self._joined])(f"t{i}")
        self.engines = {name: [FakeEngineRank(rank) for rank in range(rng.randint(1, 3))] for name in ("a", "b")}
        for ranks in self.engines.values():
            for name in self.tensors:
                self._serve(ranks, name)

    def _shape(self) -> tuple[int, ...]:
        return tuple(self.rng.choice([1, 2, 3, 5]) for _ in range(self.rng.randint(0, 3)))

    def _target(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.tensors[name] = values(shape, self.rng.randrange(2**32))
        return self.tensors[name]

    def _permuted(self, name: str) -> None:
        """The trainer holds the tensor with its dims in another order, unit dims dropped or added."""
        full = self._target(name, self._shape())
        keep = [d for d in range(full.ndim) if full.shape[d] > 1 or self.rng.random() < 0.5]
        self.rng.shuffle(keep)
        held = full.transpose(*keep, *(d for d in range(full.ndim) if d not in keep)).reshape(
            tuple(full.shape[d] for d in keep) + (1,) * self.rng.randint(0, 1)
        )
        dims = tuple(keep.index(d) if d in keep else None for d in range(full.ndim))
        self._hold(f"trainer.{name}", held)
        self._rule(f"trainer.{name}", whole(held.shape), name, (0,) * full.ndim, dims)

    def _stacked(self, name: str) -> None:
        """Several Hugging Face tensors are one trainer tensor with one more dim, transposed."""
        shape, count = (self.rng.randint(1, 3), self.rng.randint(1, 3)), self.rng.randint(1, 3)
        full = [self._target(f"{name}.{e}", shape) for e in range(count)]
        self._hold(f"trainer.{name}", np.stack([f.T for f in full]))
        for e in range(count):
            self._rule(f"trainer.{name}", Box((e, 0, 0), (1, *shape[::-1])), f"{name}.{e}", (0, 0), (2, 1))

    def _joined(self, name: str) -> None:
        """One Hugging Face tensor is several trainer tensors, one below the other, each with rows of padding."""
        shape = (self.rng.randint(2, 5), self.rng.randint(1, 3))
        full, row = self._target(name, shape), 0
        while row < shape[0]:
            rows = self.rng.randint(1, shape[0] - row)
            held = np.concatenate([full[row : row + rows], np.zeros((self.rng.randint(0, 2), shape[1]), np.uint16)])
            self._hold(f"trainer.{name}.{row}", held)
            self._rule(f"trainer.{name}.{row}", Box((0, 0), (rows, shape[1])), name, (row, 0), (0, 1))
            row += rows

    def _rule(self, source: str, box: Box, target: str, offset: tuple[int, ...], dims: tuple[int | None, ...]) -> None:
        self.trainer.rules.append(Rule(source, box, target, self.tensors[target].shape, offset, dims))

    def _hold(self, name: str, full: np.ndarray) -> None:
        """Shards of a random partition, then copies of some, then boxes that overlap others in part."""
        boxes = self._partition(full.shape, 4)
        boxes += self.rng.choices(boxes, k=self.rng.choice([0, 0, 1, 3]))
        boxes += [self.rng.choice(self._partition(full.shape, 3)) for _ in range(self.rng.choice([0, 0, 1, 2]))]
        self.rng.shuffle(boxes)
        for box in boxes:
            order = tuple(self.rng.sample(range(full.ndim), full.ndim))
            stretched = tuple(n + self.rng.randint(0, 1) for n in box.size)
            self.trainer.hold(self.rng.randrange(self.trainer.ranks), name, full, box, dense(stretched, order))

    def _partition(self, shape: tuple[int, ...], cuts: int) -> list[Box]:
        boxes = [whole(shape)]
        for _ in range(self.rng.randint(0, cuts) if shape else 0):
            box = boxes.pop(self.rng.randrange(len(boxes)))
            d = self.rng.randrange(len(shape))
            cut = self.rng.randint(0, box.size[d])
            for low, n in ((0, cut), (cut, box.size[d] - cut)):
                offset, size = list(box.offset), list(box.size)
                offset[d], size[d] = offset[d] + low, n
                boxes.append(Box(tuple(offset), tuple(size)))
        return boxes

    def _serve(self, ranks: list[FakeEngineRank], name: str) -> None:
        """Engine ranks take boxes of the tensor; a rank's boxes lie one behind the other in one parameter."""
        by_rank: dict[int, list[Box]] = {}
        for box in self._partition(self.tensors[name].shape, 4):
            for rank in self.rng.sample(range(len(ranks)), self.rng.randint(1, len(ranks))):
                by_rank.setdefault(rank, []).append(box)
        for rank, boxes in by_rank.items():
            sizes = [int(np.prod(box.size)) for box in boxes]
            param = ranks[rank].param(f"param.{name}", (sum(sizes),))
            for i, box in enumerate(boxes):
                order = tuple(self.rng.sample(range(len(box.size)), len(box.size)))
                ranks[rank].need(name, box, param, sum(sizes[:i]), dense(box.size, order))

    def plan(self):
        return plan_of(self.trainer, self.engines)

    def check(self) -> None:
        """Plan, execute, and compare every need with the tensor it is a box of; fingerprints too."""
        plan = self.plan()
        fps = region_fingerprints(plan, self.trainer)
        for engine, ranks in self.engines.items():
            for rank in ranks:
                memory = execute(plan, self.trainer, engine, rank)
                expected = plan.expected(engine, rank.rank, fps)
                assert len(expected) == len(rank.needs)
                for need, number in zip(rank.needs, expected):
                    got = view_of(memory[need.view.storage], need.view.offset, need.box.size, need.view.strides)
                    assert (got == self.tensors[need.tensor][slices(need.box)]).all()
                    assert number == fingerprint(got, need.box.offset)

    def unheld(self) -> set[str]:
        """The Hugging Face tensors of which no rank holds some element."""
        held = {}
        for shards in self.trainer.shards.values():
            for shard in shards:
                held.setdefault(shard.tensor, np.zeros(shard.shape, bool))[slices(shard.box)] = True
        missing = set()
        for rule in self.trainer.rules:
            if rule.source not in held or not held[rule.source][slices(rule.box)].all():
                missing.add(rule.target)
        return missing


worlds = st.randoms(use_true_random=False).map(World)


@settings(max_examples=100, deadline=None)
@given(worlds)
def test_any_sharding_to_any_other_gives_the_same_bytes(world: World) -> None:
    world.check()


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_a_removed_or_doubled_need_is_found(world: World) -> None:
    ranks = [r for ranks in world.engines.values() for r in ranks if any(np.prod(n.box.size) for n in r.needs)]
    rank = world.rng.choice(ranks)
    need = world.rng.choice([n for n in rank.needs if np.prod(n.box.size)])
    name = rank.params[need.view.storage].name
    double = world.rng.random() < 0.5
    rank.needs.append(need) if double else rank.needs.remove(need)
    with pytest.raises(PlanError) as caught:
        world.plan()
    assert name in str(caught.value)
    if double:
        assert "more than once" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_a_removed_shard_is_found_unless_others_hold_it_all(world: World) -> None:
    rank = world.rng.choice([rank for rank, shards in world.trainer.shards.items() if shards])
    index = world.rng.randrange(len(world.trainer.shards[rank]))
    world.trainer.shards[rank].pop(index)
    world.trainer.storages[rank].pop(index)
    unheld = world.unheld()
    if not unheld:
        world.check()
        return
    with pytest.raises(PlanError) as caught:
        world.plan()
    assert any(name in str(caught.value) for name in unheld)


# ------------------------------------------------------------------------------------------------------- layouts

SHAPES = [(5, 3), (7, 4), (1,), (1, 8), (3, 4)]


def check_all(trainer: FakeTrainer, tensors: dict[str, np.ndarray], engine: list[FakeEngineRank], **kwargs) -> None:
    plan = plan_of(trainer, {"e": engine}, **kwargs)
    for rank in engine:
        memory = execute(plan, trainer, "e", rank)
        for need in rank.needs:
            got = view_of(memory[need.view.storage], need.view.offset, need.box.size, need.view.strides)
            assert (got == tensors[need.tensor][slices(need.box)]).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_and_empty_shards(ranks: int) -> None:
    tensors = {f"w{i}": values(shape, i) for i, shape in enumerate(SHAPES)}
    trainer = FakeTrainer(ranks, rules=[identity(name, full.shape) for name, full in tensors.items()])
    for (name, full), rank in product(tensors.items(), range(ranks)):
        trainer.hold(rank, name, full, chunk(full.shape, 0, rank, ranks))
    engine = [FakeEngineRank(0), FakeEngineRank(1)]
    for (name, full), rank in product(tensors.items(), engine):
        box = chunk(full.shape, full.ndim - 1, rank.rank, 2)
        rank.need(name, box, rank.param(name, box.size))
    check_all(trainer, tensors, engine)


@pytest.mark.parametrize("tp_dim", [0, 1])
@pytest.mark.parametrize("shape", [(5, 3), (7, 4), (1, 8), (3, 4)])
def test_tp_then_fsdp(shape: tuple[int, int], tp_dim: int) -> None:
    full = values(shape)
    boxes = {2 * dp + tp: chunk(shape, 0, dp, 2, chunk(shape, tp_dim, tp, 2)) for dp, tp in product(range(2), range(2))}
    trainer = one_tensor_trainer(full, boxes)
    check_all(trainer, {"w": full}, [whole_tensor_engine(w=shape)])


def test_a_fused_parameter_gets_all_its_parts() -> None:
    tensors = {"q": values((4, 6), 1), "k": values((2, 6), 2), "v": values((2, 6), 3)}
    trainer = FakeTrainer(2, rules=[identity(name, full.shape) for name, full in tensors.items()])
    for (name, full), rank in product(tensors.items(), range(2)):
        trainer.hold(rank, name, full, chunk(full.shape, 0, rank, 2))
    engine = [FakeEngineRank(0), FakeEngineRank(1)]
    for rank in engine:
        qkv, row = rank.param("qkv", (4, 6)), 0
        for name, full in tensors.items():
            box = chunk(full.shape, 0, rank.rank, 2)
            rank.need(name, box, qkv, row * 6)
            row += box.size[0]
    check_all(trainer, tensors, engine)


def test_both_of_two_tied_engines_may_read_one_shard_into_two_parameters() -> None:
    full = values((6, 2))
    trainer = one_tensor_trainer(full, {0: whole((6, 2))})
    rank = FakeEngineRank()
    for name in ("embed", "head"):
        rank.need("w", whole((6, 2)), rank.param(name, (6, 2)))
    plan = plan_of(trainer, {"e": [rank]})
    assert len(plan.regions(0)) == 1
    assert len(plan.rank_plan("e", 0).copies) == 2
    assert len(set(plan.expected("e", 0, region_fingerprints(plan, trainer)))) == 1


# ------------------------------------------------------------------------------------------------------ replicas


def replicated(ranks: int, count: int) -> FakeTrainer:
    trainer = FakeTrainer(ranks, rules=[identity(f"w{i}", (4, 2)) for i in range(count)])
    for i, rank in product(range(count), range(ranks)):
        trainer.hold(rank, f"w{i}", values((4, 2), i), whole((4, 2)))
    return trainer


def sources_of(trainer: FakeTrainer, engine: list[FakeEngineRank], **kwargs) -> dict[int, Counter]:
    plan = plan_of(trainer, {"e": engine}, **kwargs)
    return {r.rank: Counter(copy.rank for copy in plan.rank_plan("e", r.rank).copies) for r in engine}


def test_replicas_on_the_engines_own_gpu_are_read() -> None:
    engine = [whole_tensor_engine(w0=(4, 2), w1=(4, 2)) for _ in range(2)]
    for rank, fake in enumerate(engine):
        fake.rank, fake.device = rank, f"GPU-{3 - rank}"
    devices = {rank: f"GPU-{rank}" for rank in range(4)}
    assert sources_of(replicated(4, 2), engine, devices=devices) == {0: Counter({3: 2}), 1: Counter({2: 2})}


def test_replicas_on_the_engines_own_host_come_next() -> None:
    engine = whole_tensor_engine(w0=(4, 2), w1=(4, 2))
    engine.host, engine.device = "b", "GPU-x"
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert sources_of(replicated(4, 2), [engine], hosts=hosts) == {0: Counter({2: 1, 3: 1})}


@pytest.mark.parametrize("engine_ranks", [1, 2, 3])
def test_replicas_share_the_load(engine_ranks: int) -> None:
    shapes = {f"w{i}": (4, 2) for i in range(12)}
    engine = [whole_tensor_engine(**shapes) for _ in range(engine_ranks)]
    for rank, fake in enumerate(engine):
        fake.rank = rank
    trainer = replicated(4, 12)
    reads = sources_of(trainer, engine)
    assert sum(reads.values(), Counter()) == Counter(dict.fromkeys(range(4), 3 * engine_ranks))
    assert sources_of(trainer, engine) == reads


def test_hsdp_reads_each_element_from_one_replica() -> None:
    full = values((8, 3))
    trainer = one_tensor_trainer(full, {rank: chunk((8, 3), 0, rank % 4, 4) for rank in range(8)})
    (reads,) = sources_of(trainer, [whole_tensor_engine(w=(8, 3))]).values()
    assert sorted(reads) in ([0, 1, 2, 3], [4, 5, 6, 7])


def test_boxes_that_overlap_in_part_are_read_once() -> None:
    full = values((10, 4))
    boxes = {0: Box((0, 0), (6, 4)), 1: Box((4, 0), (6, 3)), 2: Box((3, 2), (7, 2))}
    check_all(one_tensor_trainer(full, boxes), {"w": full}, [whole_tensor_engine(w=(10, 4))])


# -------------------------------------------------------------------------------------------------------- errors


def refused(trainer: FakeTrainer, *engine: FakeEngineRank, **config: object) -> str:
    with pytest.raises(PlanError) as caught:
        plan_of(trainer, {"http://e": list(engine)}, **config)
    return str(caught.value)


def test_both_lists_are_in_one_error() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))}, "model.w")
    engine = whole_tensor_engine()
    engine.param("language_model.w", (4, 2))
    engine.ignored.append("model.w")
    message = refused(trainer, engine)
    assert "tensors without a home (1):\n  model.w\n" in message
    assert (
        "parameters without a source (1):\n  language_model.w (no tensor feeds it; engine http://e rank 0)" in message
    )


def test_all_names_are_listed_and_counted() -> None:
    trainer = FakeTrainer(1, rules=[identity(f"w{i}", (2,)) for i in range(60)])
    for i in range(60):
        trainer.hold(0, f"w{i}", values((2,)), whole((2,)))
    message = refused(trainer, whole_tensor_engine())
    assert "tensors without a home (60)" in message
    assert "  w49\n  ... and 10 more" in message


def test_an_ignored_head_is_refused_with_a_hint_and_may_be_left_out() -> None:
    trainer = FakeTrainer(1, rules=[identity("embed", (4, 2)), identity("lm_head.weight", (4, 2))])
    for rule in trainer.rules:
        trainer.hold(0, rule.source, values((4, 2)), whole((4, 2)))
    engine = whole_tensor_engine(embed=(4, 2))
    engine.ignored.append("lm_head.weight")
    message = refused(trainer, engine)
    assert "lm_head.weight" in message and "leave_out" in message and "ties its head" in message
    plan = plan_of(trainer, {"e": [engine]}, leave_out=[r"^lm_head\.weight$"])
    assert plan.summary().left_out == ["lm_head.weight"]


def test_a_home_in_one_engine_is_not_a_home_in_the_other() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    with pytest.raises(PlanError, match="without a home"):
        plan_of(trainer, {"a": [whole_tensor_engine(w=(4, 2))], "b": [whole_tensor_engine()]})


def test_a_tensor_without_a_rule_has_no_home_unless_it_is_left_out_or_a_buffer() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    trainer.hold(0, "extra", values((2,)), whole((2,)))
    trainer.shards[0].append(Shard("inv_freq", (2,), DTYPE, whole((2,)), (1,), 0, is_buffer=True))
    engine = whole_tensor_engine(w=(4, 2))
    message = refused(trainer, engine)
    assert "extra" in message and "inv_freq" not in message
    assert plan_of(trainer, {"e": [engine]}, leave_out=["^extra$"]).summary().left_out == ["extra"]


def test_what_is_left_out_by_name_is_no_pattern() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    assert map_sources(trainer.shards, trainer.rules, [], [], {"w"}).left_out == ["w"]
    assert "w" in map_sources(trainer.shards, trainer.rules, [], [], {".", "ww"}).tensors


def test_a_buffer_that_no_engine_reads_is_only_mentioned() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    trainer.shards[0].append(Shard("bias", (2,), DTYPE, whole((2,)), (1,), 0, is_buffer=True))
    trainer.rules.append(identity("bias", (2,)))
    assert plan_of(trainer, {"e": [whole_tensor_engine(w=(4, 2))]}).summary().ignored == ["bias"]


def test_a_tensor_that_feeds_an_opaque_parameter_has_a_home() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))}, "kv_b_proj")
    engine = whole_tensor_engine()
    engine.param("w_kc", (4, 2))
    engine.opaque["w_kc"] = "made by cat"
    assert plan_of(trainer, {"e": [engine]}).summary().opaque == {"w_kc": "made by cat"}
    engine.ignored.append("kv_b_proj")
    assert "kv_b_proj" in refused(trainer, engine)


def test_missing_elements_are_named_by_tensor_and_box() -> None:
    trainer = one_tensor_trainer(values((8, 3)), {0: chunk((8, 3), 0, 0, 4), 2: chunk((8, 3), 0, 2, 4)})
    engine = [whole_tensor_engine(w=(8, 3)) for _ in range(3)]
    for rank, fake in enumerate(engine):
        fake.rank = rank
    message = refused(trainer, *engine)
    assert "w [2:4, 0:3] (held by no trainer rank; needed by engine http://e ranks 0-2)" in message
    assert "w [6:8, 0:3]" in message


def test_a_need_of_a_tensor_that_is_not_offered_names_both() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    assert "gone (needs gone, which the trainer does not offer" in refused(
        trainer, whole_tensor_engine(w=(4, 2), gone=(3,))
    )


@pytest.mark.parametrize("needed", [(5, 2), (4, 3), (4, 2, 1)])
def test_a_need_that_does_not_fit_the_trainers_shape(needed: tuple[int, ...]) -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    with pytest.raises(PlanError, match=r"w is \[4, 2\] on the trainer, but the engine needs its box") as caught:
        plan_of(trainer, {"e": [whole_tensor_engine(w=needed)]})
    assert (caught.value.tensor, caught.value.engine, caught.value.rank) == ("w", "e", 0)


def test_ranks_that_disagree_about_a_tensor() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: chunk((4, 2), 0, 0, 2)})
    trainer.shards[0].append(Shard("w", (6, 2), DTYPE, Box((2, 0), (2, 2)), (2, 1), 0))
    assert "w is bfloat16 [4, 2] on trainer rank 0 and bfloat16 [6, 2] on rank 0" in refused(
        trainer, whole_tensor_engine(w=(4, 2))
    )


def test_a_shard_outside_its_tensor() -> None:
    trainer = FakeTrainer(1, rules=[identity("w", (4, 2))])
    trainer.shards[0].append(Shard("w", (4, 2), DTYPE, Box((3, 0), (2, 2)), (2, 1), 0))
    assert "w: shard" in refused(trainer, whole_tensor_engine(w=(4, 2)))


def test_rules_that_do_not_fit() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    engine = whole_tensor_engine(w=(4, 2))
    trainer.rules = [Rule("w", whole((4, 3)), "w", (4, 3), (0, 0), (0, 1))]
    assert "w -> w: its box [0:4, 0:3] does not fit" in refused(trainer, engine)
    trainer.rules = [identity("absent", (4, 2), "w")]
    assert "w is made of absent, which no trainer rank holds" in refused(trainer, engine)
    trainer.rules = [identity("w", (4, 2)), Rule("w", Box((3, 0), (1, 2)), "w", (4, 2), (0, 0), (0, 1))]
    assert "w gets the same elements from w and w" in refused(trainer, engine)
    trainer.rules = [Rule("w", Box((0, 0), (n, 2)), "w", (n, 2), (0, 0), (0, 1)) for n in (4, 3)]
    assert "w is bfloat16 [4, 2] by w and bfloat16 [3, 2] by w" in refused(trainer, engine)


# -------------------------------------------------------------------------------------------------------- dtypes


def dtype_engine(**dtypes: str) -> FakeEngineRank:
    engine = FakeEngineRank()
    for param, dtype in dtypes.items():
        engine.need("w", whole((4, 2)), engine.param(param, (4, 2), dtype=dtype))
    return engine


def test_needed_dtypes_follow_rules_and_renames() -> None:
    rules = [identity("trainer.w", (4, 2), "model.w"), identity("unused", (2,))]
    rename = [RenameConfig(r"^model\.", "")]
    assert needed_dtypes({"e": [dtype_engine(p="float32").layout()]}, rules, rename) == {"trainer.w": "float32"}


def test_two_dtypes_of_one_tensor_are_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"trainer\.w is wanted as float32 by a \(engine e, rank 0\) and as bfloat16 by b"
    ):
        needed_dtypes({"e": [dtype_engine(a="float32", b="bfloat16").layout()]}, [identity("trainer.w", (4, 2), "w")])


@pytest.mark.parametrize("dtype", ["int32", "bool", "float8_e4m3fn"])
def test_dtypes_that_no_cast_reaches_are_refused(dtype: str) -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    assert f"w is bfloat16 on the trainer and {dtype} in the engine" in refused(trainer, dtype_engine(p=dtype))


def test_a_cast_is_noted_before_export_and_refused_after() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    assert "exported as bfloat16, and the engine needs float32" in refused(trainer, dtype_engine(p="float32"))
    trainer.shards[0] = [msgspec.structs.replace(shard, segment=-1) for shard in trainer.shards[0]]
    plan = plan_of(trainer, {"e": [dtype_engine(p="float32")]})
    assert plan.dtypes == {"w": "float32"}
    assert plan.summary().notes == ["1 tensors are cast by the publisher, bfloat16 to float32"]
    assert plan.summary().num_bytes == 32


# --------------------------------------------------------------------------------------------- names and summary


def description(trainer: FakeTrainer, rank: int) -> Description:
    return Description(rank, trainer.ranks, "fake", "host", 1, "boot", {}, [], trainer.shards[rank], trainer.rules)


def test_offered_tensors_have_the_engines_names() -> None:
    trainer = FakeTrainer(2, rules=[identity("a", (4, 2), "model.a"), identity("b", (3,), "model.b")])
    for rank in range(2):
        trainer.hold(rank, "a", values((4, 2)), chunk((4, 2), 0, rank, 2))
        trainer.hold(rank, "b", values((3,)), whole((3,)))
    descriptions = [description(trainer, rank) for rank in range(2)]
    assert distinct_rules(descriptions) == trainer.rules
    rename = [RenameConfig(r"^model\.", "language_model.model.")]
    assert offered(descriptions, rename, [r"\.b$"]) == {
        "language_model.model.a": TensorSpec("language_model.model.a", (4, 2), DTYPE)
    }


def test_a_renamed_tensor_is_planned_under_its_new_name() -> None:
    full = values((4, 2))
    trainer = one_tensor_trainer(full, {0: whole((4, 2))}, "model.w")
    rename = [RenameConfig(r"^model\.", "x.")]
    check_all(trainer, {"x.w": full}, [whole_tensor_engine(**{"x.w": (4, 2)})], rename=rename)


def test_renaming_two_tensors_to_one_name_is_refused() -> None:
    trainer = FakeTrainer(1, rules=[identity("a.w", (2,)), identity("b.w", (2,))])
    for rule in trainer.rules:
        trainer.hold(0, rule.source, values((2,)), whole((2,)))
    rename = [RenameConfig(r"^[ab]\.", "")]
    assert "w gets the same elements from a.w and b.w" in refused(trainer, whole_tensor_engine(w=(2,)), rename=rename)


def summary_of(devices: dict[int, str], device: str) -> PlanSummary:
    full = values((8, 500))
    trainer = one_tensor_trainer(full, {rank: chunk((8, 500), 0, rank, 2) for rank in range(2)})
    engine = whole_tensor_engine(w=(8, 500))
    engine.device = device
    engine.param("inv_freq", (4,), "buffer")
    engine.constants.append("inv_freq")
    return plan_of(trainer, {"http://e": [engine]}, devices=devices).summary("direct")


def test_the_summary_counts_bytes_by_pair_of_ranks() -> None:
    summary = summary_of({0: "GPU-0", 1: "GPU-1"}, "GPU-1")
    assert [(r.trainer_rank, r.num_bytes, r.num_copies, r.same_device) for r in summary.traffic] == [
        (0, 4000, 1, False),
        (1, 4000, 1, True),
    ]
    assert (summary.num_tensors, summary.num_bytes, summary.model_bytes) == (1, 8000, 8000)
    assert {row.route for row in summary.traffic} == {summary.route} == {"direct"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(summary), type=PlanSummary) == summary


def test_the_report_says_route_bytes_floor_and_what_is_not_covered() -> None:
    text = summary_of({0: "GPU-0", 1: "GPU-1"}, "GPU-1").explain()
    assert "route direct: 1 tensors, 8.00 kB once; a push moves 8.00 kB in 2 copies" in text
    assert "4.3 TB/s" in text and "390 GB/s" in text
    assert "engine constants, which no push writes (1):\n  inv_freq" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_floor_is_the_slowest_gpus() -> None:
    assert floor_s(summary_of({0: "GPU-0", 1: "GPU-1"}, "GPU-1")) == pytest.approx(4000 / 390e9)
    assert floor_s(summary_of({0: "GPU-1", 1: "GPU-1"}, "GPU-1")) == pytest.approx(2 * 8000 / 4.3e12)


def test_nothing_is_claimed_for_host_memory() -> None:
    assert "no claim" in summary_of({}, "").explain()


def test_nothing_is_claimed_to_be_proved_without_an_engine() -> None:
    trainer = one_tensor_trainer(values((4, 2)), {0: whole((4, 2))})
    summary = plan_of(trainer, {}).summary("bucket")
    assert "not proved" in summary.explain()
    assert floor_s(summary) is None


def test_rows_that_an_engine_does_not_read_are_noted() -> None:
    trainer = one_tensor_trainer(values((8, 3)), {0: whole((8, 3))})
    engine = FakeEngineRank()
    engine.need("w", Box((0, 0), (6, 3)), engine.param("w", (6, 3)))
    assert plan_of(trainer, {"e": [engine]}).summary().notes == ["w: engine e does not read 6 of its 24 elements"]
