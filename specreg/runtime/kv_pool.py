"""One pool of KV blocks for target and draft layers, and the views through which models use it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specreg.capabilities import KVLayerSpec
from specreg.errors import PluginError
from specreg.kernels import paged_attention, write_kv
from specreg.kernels.common.upload import upload
from specreg.ownership import cdiv
from specreg.speculator import KVRows

__all__ = ["KVPool", "PagedKVView"]


class KVPool:
    """Keys and values of all layers in blocks of `block_size` positions.

    A block id stands for the same block in every layer, so one block table a slot serves target and
    draft layers alike. Ids given to `assign` count from 0; in memory each lies one further, because
    block 0 of the tensors is the null block of `specreg.kernels.paged_attention`.

    Args:
        layers: target layers, then draft layers.
        num_blocks: blocks to hand out.
        block_size: positions a block holds.
        max_num_seqs: slots.
        max_model_len: longest request, in tokens.
        dtype: element type of layers whose spec names none.
        device: where the pool lives.

    Attributes:
        keys, values: a layer each, `[1 + num_blocks, block_size, num_kv_heads, head_dim]`, the
            values of `value_head_dim`.
        block_table: int32 `[max_num_seqs, cdiv(max_model_len, block_size)]` on the device; 0
            where the slot has no block.
    """

    def __init__(
        self,
        layers: Sequence[KVLayerSpec],
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in layers:
            shape = (1 + num_blocks, block_size, layer.num_kv_heads)
            kind = _dtype(layer, dtype)
            self.keys.append(_zeros((*shape, layer.head_dim), kind, device))
            value_shape = (*shape, layer.value_head_dim or layer.head_dim)
            self.values.append(_zeros(value_shape, kind, device))
        self.block_table = torch.zeros(
            max_num_seqs, cdiv(max_model_len, block_size), dtype=torch.int32, device=device
        )

    @staticmethod
    def block_bytes(layers: Iterable[KVLayerSpec], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all `layers`, keys and values together."""
        return sum(
            block_size
            * layer.num_kv_heads
            * (layer.head_dim + (layer.value_head_dim or layer.head_dim))
            * _dtype(layer, dtype).itemsize
            for layer in layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, the null block included."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def assign(self, updates: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Enter (slot, first table index, block ids) into the block table; no host synchronisation.

        An update at index 0 begins a new request: what the slot held before is forgotten.
        """
        entries: dict[tuple[int, int], int] = {}
        for slot, first, blocks in updates:
            if first == 0:
                entries.update(((slot, column), 0) for column in range(self.block_table.shape[1]))
            entries.update(((slot, first + i), 1 + block) for i, block in enumerate(blocks))
        if entries:
            host = torch.tensor([(slot, column, id) for (slot, column), id in entries.items()])
            slots, columns, ids = upload(host, self.block_table.device).unbind(1)
            self.block_table[slots, columns] = ids.int()

    def view(
        self, first_layer: int = 0, num_layers: int | None = None, *, is_read_only: bool = False
    ) -> PagedKVView:
        """`num_layers` layers (None: all) from `first_layer` on, counted from 0 again."""
        end = len(self.layers) if num_layers is None else first_layer + num_layers
        return PagedKVView(self, range(first_layer, end), is_read_only=is_read_only)


class PagedKVView:
    """A `KVView` of some layers of a pool, whose memory it shares."""

    def __init__(self, pool: KVPool, layers: range, *, is_read_only: bool = False) -> None:
        self._pool = pool
        self._layers = layers
        self._is_read_only = is_read_only

    def layer(self, layer: int, *, is_read_only: bool = False) -> PagedKVView:
        """A view of one layer, which is its layer 0."""
        one = self._layers[layer : layer + 1]
        return PagedKVView(self._pool, one, is_read_only=is_read_only or self._is_read_only)

    def write(self, layer: int, rows: KVRows, key: Tensor, value: Tensor) -> None:
        """See `KVView.write`. Raises `PluginError` on a read-only view."""
        if self._is_read_only:
            raise PluginError(
                "keys and values of the target cannot be written",
                where=f"KVView.write(layer={layer})",
                got="a write through a read-only view; allowed: attend",
                fix="declare the speculator's own layers in TargetNeeds.kv_specs and write there",
            )
        index = self._layers[layer]
        write_kv(
            self._pool.keys[index],
            self._pool.values[index],
            self._pool.block_table,
            rows.slots,
            rows.positions,
            key,
            value,
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        rows: KVRows,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `KVView.attend`."""
        index = self._layers[layer]
        return paged_attention(
            query,
            self._pool.keys[index],
            self._pool.values[index],
            self._pool.block_table,
            rows.slots,
            rows.positions,
            rows.kv_lens,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            query_start_loc=rows.query_start_loc,
        )


def _dtype(layer: KVLayerSpec, default: torch.dtype) -> torch.dtype:
    """The layer's element type."""
    if layer.dtype is None:
        return default
    dtype = getattr(torch, layer.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PluginError(
            "a KV layer names an unknown element type",
            where="KVLayerSpec.dtype",
            got=f"{layer.dtype!r}; allowed: a torch dtype's name, such as 'bfloat16', or None",
            fix="name a torch dtype in the speculator's kv_specs",
        )
    return dtype


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not garbage: what a mask hides still meets a weight of 0, and 0 * NaN is NaN.

    On a CPU the pages are the system's own zero pages until they are written, so a pool takes the
    memory that requests use and not the whole budget.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
