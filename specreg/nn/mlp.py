"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn

from specreg.errors import CheckpointError
from specreg.spelling import known_names

__all__ = ["GatedMLP", "activation"]

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
    }
)


def activation(name: str, where: str = "config.json") -> Callable[[Tensor], Tensor]:
    """The function that the config at `where` calls `name`. Raises `CheckpointError`."""
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            "a config names an activation that is not known",
            where=f"{where}, hidden_act",
            got=f"{name!r}; {known_names(name, _ACTIVATIONS)}",
            fix="use a checkpoint with one of these",
        )
    return _ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`.

    Args:
        hidden_size, intermediate_size: widths.
        act: name of the activation.
        bias: whether the three projections have one.
        where: of the config, for errors.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str = "silu",
        *,
        bias: bool = False,
        where: str = "config.json",
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device="meta")
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias, device="meta")
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias, device="meta")
        self.act = activation(act, where)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, hidden_size]` to the same."""
        down: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return down
