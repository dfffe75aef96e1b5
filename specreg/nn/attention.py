"""Attention of packed rows over a `KVView`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specreg.nn.rotary import RotaryAngles
from specreg.nn.shape import DecoderShape
from specreg.speculator import KVRows, KVView

__all__ = ["Attention"]


class Attention(nn.Module):
    """Grouped-query attention: projections, norms of the heads, rotary, output gate.

    Args:
        shape: of the decoder.
        layer: index of the layer, in `KVView` and in `shape.sliding_windows`.
        input_size: width of the rows that queries, keys and values are made of; None is the hidden
            size.
    """

    def __init__(self, shape: DecoderShape, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.sliding_window = shape.sliding_windows[layer]
        width = shape.hidden_size if input_size is None else input_size
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        gated = 2 if shape.has_gated_attention else 1
        bias = shape.attention_bias
        self.q_proj = nn.Linear(width, gated * query_size, bias=bias, device="meta")
        self.k_proj = nn.Linear(width, kv_size, bias=bias, device="meta")
        self.v_proj = nn.Linear(width, kv_size, bias=bias, device="meta")
        self.o_proj = nn.Linear(
            query_size, shape.hidden_size, bias=shape.attention_output_bias, device="meta"
        )
        if shape.has_head_norms:
            self.q_norm = shape.norm(shape.head_dim)
            self.k_norm = shape.norm(shape.head_dim)
        if shape.has_head_gates:
            self.g_proj = nn.Linear(width, shape.num_heads, bias=False, device="meta")
        self.sinks: nn.Parameter | None = None
        if shape.has_sinks:
            self.sinks = nn.Parameter(torch.empty(shape.num_heads, device="meta"))

    def forward(self, x: Tensor, angles: RotaryAngles, rows: KVRows, kv: KVView) -> Tensor:
        """Write the keys and values of `x [n, input_size]` at `rows`, then attend.

        Returns:
            `[n, hidden_size]`.
        """
        query, gate = self.queries(x, angles)
        self.write(x, angles, rows, kv)
        return self.attend(query, gate, rows, kv)

    def queries(self, x: Tensor, angles: RotaryAngles) -> tuple[Tensor, Tensor | None]:
        """Queries `[n, num_heads, head_dim]` after rotary; the gates before their sigmoid."""
        heads = self.q_proj(x).unflatten(-1, (self.shape.num_heads, -1))
        gate = None
        if self.shape.has_gated_attention:  # a head's queries, then its gates
            heads, gate = heads.chunk(2, dim=-1)
        elif self.shape.has_head_gates:
            gate = self.g_proj(x)[..., None]
        if self.shape.has_head_norms:
            heads = self.q_norm(heads)
        return angles.apply(heads), gate

    def keys_values(self, x: Tensor, angles: RotaryAngles) -> tuple[Tensor, Tensor]:
        """Keys after rotary and values of rows, each `[n, num_kv_heads, head_dim]`."""
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        key, value = self.k_proj(x).unflatten(-1, heads), self.v_proj(x).unflatten(-1, heads)
        if self.shape.has_head_norms:
            key = self.k_norm(key)
        if self.shape.value_scale != 1.0:
            value = value * self.shape.value_scale
        return angles.apply(key), value

    def write(self, x: Tensor, angles: RotaryAngles, rows: KVRows, kv: KVView) -> None:
        """Store keys and values of `x [n, input_size]` at `rows`."""
        kv.write(self.layer, rows, *self.keys_values(x, angles))

    def attend(self, query: Tensor, gate: Tensor | None, rows: KVRows, kv: KVView) -> Tensor:
        """Attention of queries over what is stored, `[n, hidden_size]`."""
        out = kv.attend(
            self.layer,
            query,
            rows,
            scale=self.shape.attention_scale,
            sliding_window=self.sliding_window,
            sinks=self.sinks,
        )
        if gate is not None:
            out = out * gate.sigmoid()
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected
