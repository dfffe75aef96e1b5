"""The language-model head as data: rows of a matrix and what happens to their logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LMHead"]


@dataclass(frozen=True)
class LMHead:
    """Logits `cap((hidden @ weight.T + bias) * multiplier / divisor)`, in the weight's dtype.

    Every step after the product is elementwise, so columns of a slice equal columns of the whole.

    Attributes:
        weight: `[rows, hidden_size]`; may be the embedding's own memory.
        bias: `[rows]` or None.
        multiplier, divisor: factors of the model, applied in this order; None for neither.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
    """

    weight: Tensor
    bias: Tensor | None = None
    multiplier: float | None = None
    divisor: float | None = None
    soft_cap: float | None = None

    @property
    def num_rows(self) -> int:
        """Vocabulary entries that this head scores."""
        return self.weight.shape[0]

    def rows(self, start: int, end: int) -> LMHead:
        """The head of vocabulary entries `start .. end-1`; shares memory with this one."""
        bias = None if self.bias is None else self.bias[start:end]
        return replace(self, weight=self.weight[start:end], bias=bias)

    def clone(self) -> LMHead:
        """The same head in memory of its own."""
        bias = None if self.bias is None else self.bias.clone()
        return replace(self, weight=self.weight.clone(), bias=bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[n, rows]` of `hidden [n, hidden_size]`."""
        logits = F.linear(hidden, self.weight, self.bias)
        if self.multiplier is not None:
            logits = logits * self.multiplier
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
