"""Log-probabilities of transformers' model for a folder's weights: what a trainer's own forward says.

    python teacher_forced.py FOLDER TOKEN...

Prints JSON: by dtype of the computation (float32, bfloat16), one row a prefix of the tokens, one number a next token.
Weights are the folder's, in its dtype; in float32 they are widened. Runs in envs/automodel.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, tokens = sys.argv[1], [int(t) for t in sys.argv[2:]]
    rows = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(dtype).eval()
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].float()
        rows[str(dtype).removeprefix("torch.")] = logits.log_softmax(-1).tolist()
    print("RESULT " + json.dumps(rows))


if __name__ == "__main__":
    main()
