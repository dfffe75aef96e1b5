"""The target model of one rank: its decoder, its share of the head, its keys and values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specreg.errors import InternalError
from specreg.nn.hf_decoder import DecoderOutput, HFDecoder
from specreg.ownership import Shard, cdiv
from specreg.runtime.kv_pool import PagedKVView
from specreg.speculator import KVRows, KVView

__all__ = ["ColumnGather", "Target"]


class ColumnGather(Protocol):
    """The collective that completes logits."""

    def all_gather_columns(self, local: Tensor) -> Tensor:
        """`[n, num_shards * width]` from every rank's `[n, width]`, in rank order."""
        ...


class Target:
    """A `TargetView` over a `HFDecoder`, its head sharded over the vocabulary.

    Of `c = cdiv(vocab_size, num_shards)` columns a rank, rank r scores `[r * c, (r + 1) * c)`;
    columns at or beyond `vocab_size` are -inf. With an untied head a rank keeps only its own rows;
    a tied head is the embedding, which every rank needs whole.

    Args:
        decoder: the loaded model; its head is cut to this rank's rows.
        shard: this rank.
        collectives: completes the logits when there is more than one shard.
    """

    def __init__(
        self,
        decoder: HFDecoder,
        shard: Shard | None = None,
        collectives: ColumnGather | None = None,
    ) -> None:
        self.shard = shard or Shard()
        if self.shard.num_shards > 1 and collectives is None:
            raise InternalError(
                "a sharded head has no way to complete its logits",
                where="Target(collectives)",
                got=f"None with {self.shard.num_shards} shards; allowed: a collective",
                fix="pass the tensor-parallel group",
            )
        self._decoder = decoder
        self._collectives = collectives
        self._kv: PagedKVView | None = None
        self.config: Mapping[str, Any] = decoder.config
        self.vocab_size, self.hidden_size = decoder.vocab_size, decoder.hidden_size
        self.num_layers, self.kv_specs = decoder.num_layers, decoder.kv_specs
        self.dtype, self.device = decoder.dtype, decoder.device
        self.max_model_len = decoder.max_model_len
        self.generation_config = decoder.generation_config
        self.unread_tensors = decoder.unread_tensors
        self.shard_width = cdiv(self.vocab_size, self.shard.num_shards)
        if self.shard.num_shards > 1:
            start = min(self.shard.shard_idx * self.shard_width, self.vocab_size)
            decoder.keep_head_rows(start, min(start + self.shard_width, self.vocab_size))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
        collectives: ColumnGather | None = None,
    ) -> Target:
        """Load a checkpoint directory; see `HFDecoder.load` for its errors.

        What the target does not read may be a speculator's: the caller warns of `unread_tensors`.
        """
        decoder = HFDecoder.load(path, dtype=dtype, device=device, warns=False)
        return cls(decoder, shard, collectives)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters that this rank keeps."""
        return self._decoder.weight_bytes

    def attach_kv(self, kv: PagedKVView) -> None:
        """Let `kv(layer)` show these layers, which hold the target's keys and values."""
        self._kv = kv

    def forward(
        self,
        input_ids: Tensor,
        rows: KVRows,
        kv: KVView,
        *,
        aux_layer_ids: Iterable[int] = (),
        pre_norm: bool = False,
    ) -> DecoderOutput:
        """Run packed tokens; see `HFDecoder.forward`."""
        return self._decoder.forward(
            input_ids, rows, kv, aux_layer_ids=aux_layer_ids, pre_norm=pre_norm
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `TargetView.embed`."""
        return self._decoder.embed(token_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """See `TargetView.compute_logits`; one collective when there is more than one shard."""
        local = self.compute_logits_local(hidden_states)
        if self.shard.num_shards == 1 or self._collectives is None:
            return local
        return self._collectives.all_gather_columns(local)[:, : self.vocab_size]

    def compute_logits_local(self, hidden_states: Tensor) -> Tensor:
        """This rank's columns `[n, shard_width]`; -inf where a column has no vocabulary entry."""
        logits = self._decoder.compute_logits(hidden_states)
        padding = self.shard_width - logits.shape[-1]
        return F.pad(logits, (0, padding), value=float("-inf")) if padding else logits

    def kv(self, layer: int) -> KVView:
        """Read-only view of one layer, which is its layer 0; `write` raises `PluginError`."""
        if self._kv is None:
            raise InternalError(
                "the target has no keys and values yet",
                where="Target.kv",
                got="a call before the pool is allocated; allowed: from propose() on",
                fix="ask for the target's KV when it is needed, not while loading",
            )
        return self._kv.layer(layer, is_read_only=True)
