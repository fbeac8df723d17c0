"""Names of torch modules as Hugging Face writes them: what wrappers put in between is taken out again."""

from __future__ import annotations

from collections.abc import Iterable

from weightsync.errors import ConfigError

_SEGMENTS = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
_PEFT = "base_model.model."


def plain_name(name: str) -> str:
    """``name`` without the segments of FSDP, torch.compile, activation checkpointing and PEFT."""
    name = ".".join(part for part in name.split(".") if part not in _SEGMENTS)
    name = name.removeprefix(_PEFT)
    return name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def refuse_what_has_no_weights_of_its_own(names: Iterable[str]) -> None:
    """Raise ConfigError on adapters, which must be merged before their sum can be published, and on flat parameters."""
    names = list(names)
    adapters = [n for n in names if any(part.startswith("lora_") for part in n.split("."))]
    if adapters:
        raise ConfigError(
            f"{len(adapters)} LoRA tensors, such as {adapters[0]}: merge adapters into the base weights "
            "(for PEFT: merge_and_unload) before they are published",
            tensor=adapters[0],
        )
    flat = [n for n in names if n.split(".")[-1] == "_flat_param"]
    if flat:
        raise ConfigError(f"{flat[0]} belongs to FSDP1, which flattens parameters: use fully_shard", tensor=flat[0])
