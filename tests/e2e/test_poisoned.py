"""The strongest test of coverage: an engine whose every parameter, buffer and derived tensor is NaN, and one push.

Afterwards its log-probabilities are those of a fresh load of the same weights from disk, to the last bit.
"""

from __future__ import annotations

import pytest

from tests.e2e.training import Training
from tests.servers import BOOT_SEED, PADDED, PADDED_TIED, Kind, Servers, log_probabilities
from weightsync.deadline import Deadline
from weightsync.demo_model import DemoModel
from weightsync.errors import VerifyMismatch

OTHER_SEED = 2
KINDS = [
    Kind("0.5.23"),
    Kind("0.5.23", model=DemoModel(family="qwen2", dtype="bfloat16")),
    Kind("0.5.23", model=DemoModel(family="qwen3_moe")),
    PADDED,
    PADDED_TIED,  # a Llama
]

pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("kind", KINDS, ids=str)]


def test_a_poisoned_engine_says_after_a_push_what_a_fresh_load_says(
    servers: Servers, training: Training, kind: Kind
) -> None:
    url, words, soon = servers.get(kind).url, kind.model.vocab_size, Deadline(60.0, "test")
    with training.into(url, kind.model) as one:
        one.push(OTHER_SEED)
        other = log_probabilities(url, words)
        assert other != servers.fresh(kind), "the two seeds cannot be told apart"
        one.link.client.pause("abort", soon)
        one.link.receivers.call("poison", None, soon)
        one.train(BOOT_SEED)
        with pytest.raises(VerifyMismatch, match=r"constant|no push writes") as caught:
            one.push_again()  # a push of weights alone leaves the rotary cache poisoned, and says so
        assert caught.value.tensor.endswith("cos_sin_cache")
        assert [e["state"] for e in caught.value.report] == ["fenced"]
        healed = one.push_again()
        assert healed.verified and [e.state for e in healed.engines] == ["serving"]
        assert log_probabilities(url, words) == servers.fresh(kind)
        one.push(OTHER_SEED)
        assert log_probabilities(url, words) == other
