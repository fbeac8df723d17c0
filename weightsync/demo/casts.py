"""Who trains in the demo of each pair. No torch, no trainer: the driver imports this file."""

from __future__ import annotations

from typing import NamedTuple


class Cast(NamedTuple):
    """Who trains in a pair's demo: an environment, the class of a rank in it, and what the screen says of it."""

    env: str
    module: str
    name: str
    note: str
    title: str


CASTS = {
    "sgl_dtensor_v2": Cast(
        env="automodel",
        module="weightsync.demo.trainer",
        name="DemoTrainer",
        note="FSDP2 ranks of nemo-automodel's Qwen3 on gloo (its class is made directly:\n"
        "NeMoAutoModelForCausalLM.from_config asks for CUDA; GPU runs use it)",
        title="one sentence, learnt under FSDP2, served by SGLang",
    ),
    "sgl_megatron": Cast(
        env="megatron",
        module="weightsync.demo.megatron_trainer",
        name="MegatronDemoTrainer",
        note="tensor-parallel ranks of megatron-core's GPTModel on gloo (forward and backward are its own; its\n"
        "optimizers want a GPU, so torch's AdamW takes the steps)",
        title="one sentence, learnt by Megatron-core, served by SGLang",
    ),
}
