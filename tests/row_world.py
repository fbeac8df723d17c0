"""A session from training ranks on hosts of made-up names into fake engines, over gloo."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fakes.engine import FakeEngine
from tests.fakes.model import FakeModel
from tests.fakes.rows import RowTrainer
from tests.senders import BUCKET_BYTES
from tests.test_session import assert_serves
from weightsync.config import load_config
from weightsync.reports import PushRequest
from weightsync.session import Session

SHAPES = FakeModel().shapes


class RowWorld:
    """``hosts``: of each rank. ``settings`` beside the sides themselves. The session is made when first asked for.

    ``replicated``: what every rank holds whole.
    """

    def __init__(
        self, engines: list[FakeEngine], hosts: list[str], *, replicated: Sequence[str] = ("norm.weight",), **settings
    ) -> None:
        self.trainer = RowTrainer(SHAPES, hosts, replicated=replicated)
        self.engines = engines
        self._settings = {
            "pair": "sgl_dtensor_v2",
            "bucket_bytes": BUCKET_BYTES * 9 // 8,  # a ninth smaller where ranks are on several nodes
            "verify": "fingerprint" if all(e.loaders for e in engines) else "none",
            "timeout_s": 60.0,
            "connect_timeout_s": 60.0,
            "engines": [{"url": e.url} for e in engines],
            "publishers": self.trainer.addresses,
        } | settings
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        if self._session is None:
            self._session = Session(load_config(self._settings), trainer="dtensor_v2")
        return self._session

    def push(self, step: int, **request):
        _ = self.session
        self.trainer.train(step)
        return self.session.push(PushRequest(step=step, **request))

    def assert_all_serve(self, step: int) -> None:
        for one in self.engines:
            assert_serves(one, self.trainer.tensors, step)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self.trainer.close()
        for one in self.engines:
            one.close()
