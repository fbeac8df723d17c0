"""Names as wrappers make them, and as Hugging Face has them."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigError
from weightsync.trainers.dtensor_names import plain_name, refuse_what_has_no_weights_of_its_own

WRAPPED = {
    "model.norm.weight": "model.norm.weight",
    "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
    "_orig_mod.model.norm.weight": "model.norm.weight",
    "model.layers.0._checkpoint_wrapped_module.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": "model.layers.0.self_attn.q_proj.weight",
    "base_model.model.lm_head.modules_to_save.default.weight": "lm_head.weight",
    "_orig_mod.base_model.model._fsdp_wrapped_module.lm_head.base_layer.bias": "lm_head.bias",
    "model.my_orig_mod.base_model.model.weight": "model.my_orig_mod.base_model.model.weight",
}


@pytest.mark.parametrize(("wrapped", "plain"), WRAPPED.items())
def test_wrappers_leave_no_trace_in_a_name(wrapped, plain):
    assert plain_name(wrapped) == plain
    assert plain_name(plain) == plain


def test_adapters_are_refused_with_how_many_and_what_to_do():
    names = ["a.weight", "a.lora_A.default.weight", "a.lora_B.default.weight"]
    with pytest.raises(ConfigError, match=r"2 LoRA tensors.*a\.lora_A\.default\.weight.*merge"):
        refuse_what_has_no_weights_of_its_own(names)
    refuse_what_has_no_weights_of_its_own(["explora_tion.weight", "a.weight"])
