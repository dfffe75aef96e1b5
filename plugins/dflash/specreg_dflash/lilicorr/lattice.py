"""A small transformer over the candidates of all steps at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg.nn.norms import RMSNorm
from specreg_dflash.lilicorr.config import LatticeConfig

__all__ = ["LatticeLayer", "UpDown"]


class UpDown(nn.Module):
    """`down(silu(up(x)))`, with biases.

    Args:
        width: of its input.
        inner, out: of what `up` and `down` give.
    """

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, device="meta")
        self.down_proj = nn.Linear(inner, out, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to `[..., out]`."""
        down: Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return down


class LatticeAttention(nn.Module):
    """Every candidate attends to all, those of later steps included.

    Args:
        hidden_size, num_heads: width and heads.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        weight = torch.empty(3 * hidden_size, hidden_size, device="meta")
        self.in_proj_weight = nn.Parameter(weight)
        self.in_proj_bias = nn.Parameter(torch.empty(3 * hidden_size, device="meta"))
        self.out_proj = nn.Linear(hidden_size, hidden_size, device="meta")

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`x [num_reqs, n, hidden_size]` to the same; `bias [num_heads, n, n]` on the scores."""
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        heads = packed.view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mask = bias.expand(len(x), -1, -1, -1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        projected: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return projected


class LatticeLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`.

    Args:
        config: sizes.
    """

    def __init__(self, config: LatticeConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn_norm = RMSNorm(width, config.eps)
        self.attn = LatticeAttention(width, config.num_heads)
        self.mlp_norm = RMSNorm(width, config.eps)
        self.mlp = UpDown(width, config.intermediate_size, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """As of `LatticeAttention`."""
        x = x + self.attn(self.attn_norm(x), bias)
        fed: Tensor = x + self.mlp(self.mlp_norm(x))
        return fed
