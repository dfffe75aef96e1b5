"""Pools and rows for tests of `paged_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 4
MAX_BLOCKS = 10


class Paged:
    """Random pools with shuffled blocks, and the dense keys and values that they hold."""

    def __init__(
        self,
        *,
        num_slots: int = 5,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        value_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        table_dtype: torch.dtype = torch.int64,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        num_blocks = 1 + num_slots * MAX_BLOCKS
        order = 1 + torch.randperm(num_blocks - 1, generator=generator)
        self.block_table = order.view(num_slots, MAX_BLOCKS).to(table_dtype)
        self.dense_keys = torch.randn(
            num_slots, MAX_BLOCKS * BLOCK_SIZE, num_kv_heads, head_dim, generator=generator
        ).to(dtype)
        self.dense_values = torch.randn(
            num_slots,
            MAX_BLOCKS * BLOCK_SIZE,
            num_kv_heads,
            value_head_dim or head_dim,
            generator=generator,
        ).to(dtype)
        shape = (num_blocks, BLOCK_SIZE, num_kv_heads)
        self.key_pool = torch.full((*shape, head_dim), float("nan"), dtype=dtype)
        self.value_pool = torch.full(
            (*shape, value_head_dim or head_dim), float("nan"), dtype=dtype
        )
        for slot in range(num_slots):
            blocks = self.block_table[slot].long()
            self.key_pool[blocks] = self.dense_keys[slot].unflatten(0, (MAX_BLOCKS, BLOCK_SIZE))
            self.value_pool[blocks] = self.dense_values[slot].unflatten(0, (MAX_BLOCKS, BLOCK_SIZE))
        self.num_heads, self.head_dim, self.dtype = num_heads, head_dim, dtype

    def query(self, num_tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(num_tokens, self.num_heads, self.head_dim, generator=generator).to(
            self.dtype
        )

    def dense(
        self,
        query: Tensor,
        slots: Tensor,
        positions: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One query at a time, one head at a time, from the definition."""
        group = self.num_heads // self.dense_keys.shape[2]
        out = torch.zeros(*query.shape[:2], self.dense_values.shape[-1], dtype=torch.float64)
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            first = 0
            if sliding_window is not None:
                first = max(0, int(positions[token]) - sliding_window + 1)
            seen = slice(first, int(kv_lens[token]))
            for head in range(self.num_heads):
                keys = self.dense_keys[slot, seen, head // group].double()
                values = self.dense_values[slot, seen, head // group].double()
                scores = keys @ query[token, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                mass = scores.exp()
                total = mass.sum() + (0 if sinks is None else sinks[head].double().exp())
                out[token, head] = (mass / total) @ values
        return out

    def hide_unseen(self, rows: tuple[Tensor, ...], sliding_window: int | None) -> None:
        """Put NaN wherever no row of `rows` looks."""
        seen = torch.zeros(self.key_pool.shape[:2], dtype=torch.bool)
        for slot, position, kv_len in zip(*(part.tolist() for part in rows), strict=True):
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for key in range(first, kv_len if slot >= 0 else 0):
                seen[self.block_table[slot, key // BLOCK_SIZE].long(), key % BLOCK_SIZE] = True
        self.key_pool[~seen] = float("nan")
        self.value_pool[~seen] = float("nan")


def rows_of(*requests: tuple[int, list[int]], visible: int | None = None) -> tuple[Tensor, ...]:
    """Slots, positions and visible keys of packed (slot, positions); causal unless told."""
    slots = [slot for slot, positions in requests for _ in positions]
    slots = torch.tensor(slots, dtype=torch.int64)
    positions = [p for _, positions in requests for p in positions]
    positions = torch.tensor(positions, dtype=torch.int64)
    kv_lens = positions + 1 if visible is None else torch.full_like(positions, visible)
    return slots, positions, kv_lens


def ragged_rows() -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Rows of several requests with padding among them, and the requests' offsets."""
    rows = rows_of((3, [0, 1, 2, 3, 4, 5, 6]), (0, [12]), (-1, [0, 9]), (4, [36, 37, 38]), (1, [0]))
    return rows, (0, 7, 8, 10, 13, 14)
