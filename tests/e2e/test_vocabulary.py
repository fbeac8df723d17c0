"""101 words in an engine that pads them to 128 rows over TP=2, from ranks that hold 51 and 50: with head and tied."""

from __future__ import annotations

import pytest

from tests.e2e.training import Training
from tests.servers import BOOT_SEED, PADDED, PADDED_TIED, Kind, Servers, log_probabilities
from weightsync.boxes import volume
from weightsync.spec import Box, Layout

WORDS, ENGINE_ROWS = 101, 64

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.parametrize("kind", [PADDED, PADDED_TIED], ids=str),
]


def boxes(layout: Layout, tensor: str) -> list[Box]:
    return [need.box for need in layout.needs if need.tensor == tensor]


def test_the_engine_gets_exactly_the_101_rows_that_there_are(servers: Servers, training: Training, kind: Kind) -> None:
    url, hidden = servers.get(kind).url, kind.model.hidden_size
    tables = ["model.embed_tokens.weight"] + ([] if kind.model.tie_word_embeddings else ["lm_head.weight"])
    assert (kind.model.vocab_size, kind.tp_size) == (WORDS, 2)
    with training.into(url, kind.model) as one:
        rows = training.train(1, BOOT_SEED)
        one.step = 1
        assert [rank[0] for rank in rows] == [51, 50]
        layouts = one.link.layouts
        for tensor in tables:
            asked = [boxes(layout, tensor) for layout in layouts]
            assert asked == [
                [Box((0, 0), (ENGINE_ROWS, hidden))],
                [Box((ENGINE_ROWS, 0), (WORDS - ENGINE_ROWS, hidden))],
            ]
            assert sum(volume(box) for rank in asked for box in rank) == WORDS * hidden
        for layout in layouts:
            held = [p for p in layout.params if "embed_tokens" in p.name or "lm_head" in p.name]
            assert [(p.kind, p.shape) for p in held] == [("parameter", (ENGINE_ROWS, hidden))] * len(tables)
        padding = [sum(volume(Box((0,) * len(f.size), f.size)) for f in layout.fills) for layout in layouts]
        assert padding == [0, len(tables) * (2 * ENGINE_ROWS - WORDS) * hidden]
        assert all(fill.value == 0 for fill in layouts[1].fills)
        assert one.push_again().verified
        assert log_probabilities(url, WORDS) == servers.fresh(kind)
