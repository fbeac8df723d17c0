"""The oracle: mbridge puts seeded Hugging Face checkpoints into Megatron models, and takes them out again.

    python megatron_oracle.py OUT [CASE ...]

For each case of ``megatron_cases`` it writes, below OUT/CASE: ``expected.pt`` (Hugging Face's tensors as
mbridge exports them), ``rank{r}.pt`` (what mbridge loaded: a list of chunks, each a state dict) and ``config.json``.
Nothing of weightsync can be imported here: the process ends if it can.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

# The environment has weightsync installed for the trainer's sake; not for this process.
sys.path[:] = [p for p in sys.path if not (Path(p) / "weightsync").is_dir()]
sys.meta_path[:] = [f for f in sys.meta_path if "weightsync" not in repr(f)]
if importlib.util.find_spec("weightsync") is not None:
    raise SystemExit("the oracle must not be able to import weightsync")
sys.path.insert(0, str(Path(__file__).parent))

import megatron_parts  # noqa: E402
import torch  # noqa: E402
from mbridge import AutoBridge  # noqa: E402
from mbridge.core.safetensor_io import SafeTensorIO  # noqa: E402
from mbridge.models import DeepseekV3Bridge  # noqa: E402
from megatron_cases import CASES, Case, build_chunks, hf_config, initialize, run_ranks  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

ON_A_CPU = {
    "use_cpu_initialization": True,
    "moe_token_dispatcher_type": "allgather",  # the other makes a CUDA stream
    "variable_seq_lengths": False,
    "moe_shared_expert_overlap": False,
    "attention_backend": "auto",
}


def known_only(config_class: type):
    """``config_class`` without the arguments that megatron-core 0.19 no longer has and mbridge still gives."""
    known = {field.name for field in dataclasses.fields(config_class)}
    return lambda **arguments: config_class(**{k: v for k, v in arguments.items() if k in known})


def checkpoint(case: Case) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of transformers' own model, with seeded values; the router's bias stays float32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(case))
    generator = torch.Generator().manual_seed(sum(case.model_type.encode()))
    tied = {"lm_head.weight"} if case.hf.get("tie_word_embeddings") else set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        if name not in tied:
            tensors[name] = torch.randn(tensor.shape, generator=generator).to(dtype)
    return tensors


def rank_main(rank: int, out: Path, names: list[str]) -> None:
    megatron_parts.prepare()
    torch.set_grad_enabled(False)
    DeepseekV3Bridge.TransformerConfigClass = staticmethod(known_only(DeepseekV3Bridge.TransformerConfigClass))
    for name in names:
        case = CASES[name]
        initialize(case)
        folder = out / name
        tensors = checkpoint(case)
        if rank == 0:
            folder.mkdir(parents=True)
            hf_config(case).save_pretrained(folder)
            save_file(tensors, folder / "model.safetensors")
        torch.distributed.barrier()
        bridge = AutoBridge.from_config(hf_config(case), make_vocab_size_divisible_by=case.padded_to)
        bridge._get_safetensor_io = SafeTensorIO  # DeepSeek's own reads fp8 on a GPU
        bridge.set_extra_args(**ON_A_CPU)
        chunks = build_chunks(case, bridge._model_provider([]))
        bridge.load_weights(chunks, str(folder))
        exported = {n: t.detach().clone() for n, t in bridge.export_weights(chunks)}
        if rank == 0:
            check(name, exported, tensors)
            torch.save(exported, folder / "expected.pt")
        states = [{k: v for k, v in chunk.state_dict().items() if "_extra_state" not in k} for chunk in chunks]
        torch.save({"config": bridge.config, "chunks": states}, folder / f"rank{rank}.pt")


def check(case: str, exported: dict[str, torch.Tensor], checkpoint: dict[str, torch.Tensor]) -> None:
    """mbridge's way in and its way out agree; so a mistake of the stand-ins would show here."""
    wrong = [n for n in exported.keys() | checkpoint.keys() if n not in exported or n not in checkpoint]
    wrong += [n for n in exported.keys() & checkpoint.keys() if not torch.equal(exported[n], checkpoint[n])]
    if wrong:
        raise SystemExit(f"{case}: mbridge's export differs from what it loaded: {sorted(wrong)[:5]}")


if __name__ == "__main__":
    run_ranks(rank_main, Path(sys.argv[1]), sys.argv[2:] or list(CASES))
