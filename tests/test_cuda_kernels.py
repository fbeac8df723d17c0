"""The Triton kernels and their tables, run by Triton's interpreter on a CPU in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interpret_kernels.py")


@pytest.mark.parametrize(
    "check", ["check_fingerprints", "check_fingerprint_of_cast", "check_copies", "check_casting_copies"]
)
def test_kernel(check: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), check], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("ok"), done.stderr
