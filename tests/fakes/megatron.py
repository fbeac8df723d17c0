"""Stand-ins for megatron-core's model objects: as much of them as the reader looks at. No megatron, no processes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

CONFIG = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "gated_linear_unit": True,
    "layernorm_zero_centered_gamma": False,
    "num_moe_experts": None,
}


class Group:
    """A process group as seen by one of its ranks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Chunk(nn.Module):
    """A model chunk with the parameters and buffers given by name; ``first_layer`` is the global number of layer 0."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        first_layer: int = 0,
        tied: bool = False,
        pattern: str | None = None,
        tp: Group | None = None,
        ep: Group | None = None,
        expt_tp: Group | None = None,
        **config: object,
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(**{**CONFIG, **config})
        self.pg_collection = SimpleNamespace(tp=tp or Group(), ep=ep or Group(), expt_tp=expt_tp or Group())
        self.share_embeddings_and_output_weights = tied
        self.hybrid_layer_pattern = pattern
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()
        for name, tensor in tensors.items():
            self._add(name.split("."), tensor)
        for i, layer in enumerate(self.decoder.layers):
            layer.layer_number = first_layer + i + 1

    def _add(self, path: list[str], tensor: torch.Tensor) -> None:
        module: nn.Module = self
        for part in path[:-1]:
            if isinstance(module, nn.ModuleList):
                while len(module) <= int(part):
                    module.append(nn.Module())
            elif not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(path[-1], tensor)
        else:
            module.register_buffer(path[-1], tensor)


class Wrapper(nn.Module):
    """Float16Module, DistributedDataParallel and their like: the model is ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def parameter(data: torch.Tensor, dim: int | None = None, stride: int = 1) -> nn.Parameter:
    """A parameter marked as megatron-core marks it; ``dim``: what it is cut along, None for a whole one."""
    result = nn.Parameter(data, requires_grad=data.is_floating_point())
    result.tensor_model_parallel = dim is not None
    result.partition_dim = -1 if dim is None else dim
    result.partition_stride = stride
    return result
