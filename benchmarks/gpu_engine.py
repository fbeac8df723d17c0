"""A real SGLang on GPUs, serving dummy weights of a ``config.json``. Runs in the benchmark; no torch, no sglang."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trainers import Interpreter
from weightsync.engines.local import RECEIVER, LocalEngine, free_port

MEMORY_FRACTION = 0.6
MAX_TOKENS = 65_536
"""The KV cache is kept small by its tokens, not by SGLang's share of the memory: that is reckoned from what is free
while it starts, and a trainer on the same GPU may start at the same time."""


class GpuEngine(LocalEngine):
    """``model`` is a folder with a ``config.json``. GPUs from ``first_gpu`` on are used, of those that it sees.

    ``visible`` is its ``CUDA_VISIBLE_DEVICES`` ("": all). Attention runs in Triton and sampling in PyTorch, so that
    neither flashinfer nor FA3 has to be installed.
    """

    def __init__(
        self,
        model: Path,
        *,
        interpreter: Interpreter,
        log: Path | None = None,
        tp_size: int = 1,
        first_gpu: int = 0,
        visible: str = "",
        cuda_graphs: bool = False,
        memory_saver: bool = False,
        args: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log or Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
        options = {
            "--model-path": str(model),
            "--load-format": "dummy",
            "--attention-backend": "triton",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--mem-fraction-static": str(MEMORY_FRACTION),
            "--max-total-tokens": str(MAX_TOKENS),
            "--tp-size": str(tp_size),
            "--base-gpu-id": str(first_gpu),
            "--custom-weight-loader": RECEIVER,
            "--host": "127.0.0.1",
            "--port": str(self.port),
        }
        flags = ["--skip-tokenizer-init", "--skip-server-warmup", "--disable-piecewise-cuda-graph"]
        flags += ["--cuda-graph-max-bs", "16"] if cuda_graphs else ["--disable-cuda-graph"]
        flags += ["--enable-memory-saver"] if memory_saver else []
        variables = interpreter.variables() | {"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "HF_HUB_OFFLINE": "1"}
        variables |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        pairs = [part for pair in options.items() for part in pair]
        with open(self.log, "wb") as output:
            self._process = subprocess.Popen(
                interpreter.command("-m", "sglang.launch_server", *pairs, *flags, *args),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
