"""``weightsync demo``, and what its processes have imported: run in the driver's environment with the demo's arguments.

When the training ranks have trained and pushed, each is asked for its modules; at the end the driver tells its own.
Prints two lines of JSON, ``TRAINERS`` and ``DRIVER``, beside the demo's screen; exits as the demo does.
"""

from __future__ import annotations

import json
import sys

from weightsync.cli import app
from weightsync.demo import run as demo


def main() -> None:
    loop = demo._loop

    def asking(sync, trainers, *rest):
        rows = loop(sync, trainers, *rest)
        print("TRAINERS " + json.dumps(demo._all(trainers, "modules")), flush=True)
        return rows

    demo._loop = asking
    try:
        app(["demo", *sys.argv[1:]])
    finally:
        print("DRIVER " + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), flush=True)


if __name__ == "__main__":
    main()
