"""Stand-ins for Transformer Engine's modules, with the same parameters on a CPU, and what megatron-core needs there.

Parameters, their names, cutting and attributes are as Transformer Engine's; nothing here computes a forward.
Runs in envs/megatron. Imports nothing of weightsync.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from torch.overrides import TorchFunctionMode


class Norm(torch.nn.Module):
    """A norm's weight."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))


class NormColumnLinear(ColumnParallelLinear):
    """A norm and a column-parallel projection in one module."""

    def __init__(self, input_size, output_size, **options):
        super().__init__(input_size, output_size, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=options["config"].params_dtype))


class DuplicatedLinear(torch.nn.Module):
    """The whole weight on every rank."""

    def __init__(self, input_size, output_size, *, config, parallel_mode, **_):
        super().__init__()
        assert parallel_mode == "duplicated"
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.tensor_model_parallel = False
        self.weight.partition_dim = 0
        self.weight.partition_stride = 1


class _Grouped(torch.nn.Module):
    """``weight0`` to ``weight{n-1}``, each cut along ``dim`` with stride 1 whether gated or not."""

    dim: int

    def __init__(self, count, input_size, output_size, *, config, pg_collection, **_):
        super().__init__()
        shape = [output_size, input_size]
        shape[self.dim] //= pg_collection.expt_tp.size()
        for i in range(count):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, self.dim, 1
            weight.allreduce = False
            self.register_parameter(f"weight{i}", weight)


class GroupedColumn(_Grouped):
    dim = 0


class GroupedRow(_Grouped):
    dim = 1


class Attention(torch.nn.Module):
    """No parameters."""

    def __init__(self, *_, **__):
        super().__init__()


class Provider(backends.LocalSpecProvider):
    """megatron-core's choice of modules, with the names that Transformer Engine gives them."""

    def linear(self):
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormColumnLinear

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        return Norm

    def core_attention(self):
        return Attention

    def grouped_mlp_modules(self, moe_use_grouped_gemm):
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(False)
        return partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=GroupedColumn, linear_fc2=GroupedRow))


class OnCpu(TorchFunctionMode):
    """Where megatron-core says ``device="cuda"``, this says ``cpu``, and types of tensors are called CUDA's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def prepare() -> None:
    """Let megatron-core build models on a CPU, and give it the stand-ins where it looks for Transformer Engine."""
    from megatron.core.extensions import transformer_engine_spec_provider

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    transformer_engine_spec_provider.TESpecProvider = Provider
    backends.LocalSpecProvider.core_attention = Provider.core_attention
    gpt_layer_specs.TESpecProvider = Provider
    gpt_layer_specs.TENorm = Norm
    multi_latent_attention.TELinear = DuplicatedLinear
    multi_latent_attention.TELayerNormColumnParallelLinear = NormColumnLinear
