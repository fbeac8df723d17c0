"""A training rank and its node's actor, as a process of another network namespace. Steps to train come on stdin."""

from __future__ import annotations

import json
import sys

from tests.fakes.model import FakeModel
from tests.fakes.rows import RowTrainer
from weightsync.transports.node import NodeServer


def main() -> None:
    host, name = sys.argv[1:]
    trainer = RowTrainer(FakeModel().shapes, ["", name], replicated=["norm.weight"], bind=host, ranks=[1])
    node = NodeServer(host=host)
    print(json.dumps({"publisher": trainer.addresses[0], "node": node.address}), flush=True)
    for line in sys.stdin:
        trainer.train(int(line))
        print("trained", flush=True)
    trainer.close()
    node.close()


if __name__ == "__main__":
    main()
