"""A small torch module that loads as SGLang's models do: fused, sliced by TP rank, padded, silent about other names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class FakeModel(nn.Module):
    """An embedding with padded rows, a gate/up pair fused in one parameter, a down projection, and a norm.

    Column-parallel parts are sliced along dim 0 and the row-parallel one along dim 1 for ``tp_rank`` of ``tp_size``.
    Names and full shapes of what it takes are in ``shapes``.
    """

    def __init__(
        self,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        vocab_size: int = 10,
        padded_vocab_size: int = 16,
        hidden: int = 8,
        inner: int = 12,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.vocab_size = tp_rank, tp_size, vocab_size
        self.shapes = {
            "embed.weight": (vocab_size, hidden),
            "mlp.gate.weight": (inner, hidden),
            "mlp.up.weight": (inner, hidden),
            "mlp.down.weight": (hidden, inner),
            "norm.weight": (hidden,),
        }
        self._inner = inner // tp_size
        self._rows = padded_vocab_size // tp_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, -1.0, dtype=dtype), requires_grad=False)

        self.embed = parameter(self._rows, hidden)
        self.gate_up = parameter(2 * self._inner, hidden)
        self.down = parameter(hidden, self._inner)
        self.norm = parameter(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy what it knows into place; names that it does not know change nothing."""
        inner, first = self._inner, self.tp_rank * self._inner
        for name, weight in weights:
            if name == "embed.weight":
                self._load_rows(weight)
            elif name == "mlp.gate.weight":
                self.gate_up.data[:inner].copy_(weight.narrow(0, first, inner))
            elif name == "mlp.up.weight":
                self.gate_up.data[inner:].copy_(weight.narrow(0, first, inner))
            elif name == "mlp.down.weight":
                self.down.data.copy_(weight.narrow(1, first, inner))
            elif name == "norm.weight":
                self.norm.data.copy_(weight)

    def _load_rows(self, weight: torch.Tensor) -> None:
        first = self.tp_rank * self._rows
        rows = max(0, min(self._rows, self.vocab_size - first))
        if rows:
            self.embed.data[:rows].copy_(weight.narrow(0, first, rows))
        if rows < self._rows:
            self.embed.data[rows:].fill_(0)
