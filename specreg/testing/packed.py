"""Packed steps of several requests through a decoder, for comparisons with whole forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specreg.capabilities import KVLayerSpec
from specreg.nn.hf_decoder import DecoderOutput
from specreg.runtime.kv_pool import KVPool
from specreg.speculator import KVRows, KVView

__all__ = ["PackedRequests"]


class _Decoder(Protocol):
    kv_specs: tuple[KVLayerSpec, ...]
    dtype: torch.dtype
    device: torch.device

    def forward(
        self, input_ids: Tensor, rows: KVRows, kv: KVView, *, aux_layer_ids: Sequence[int]
    ) -> DecoderOutput: ...


class PackedRequests:
    """Requests at slots of their own in one pool whose blocks are shuffled.

    Args:
        decoder: an `HFDecoder` or a `Target`.
        num_slots: requests, one a slot.
        max_model_len: longest request.
        block_size: positions a block.
    """

    def __init__(
        self, decoder: _Decoder, num_slots: int, *, max_model_len: int = 64, block_size: int = 4
    ) -> None:
        blocks_per_slot = max_model_len // block_size
        self.decoder = decoder
        self.pool = KVPool(
            decoder.kv_specs,
            num_blocks=num_slots * blocks_per_slot,
            block_size=block_size,
            max_num_seqs=num_slots,
            max_model_len=max_model_len,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        order = torch.randperm(self.pool.num_blocks, generator=torch.Generator().manual_seed(0))
        tables = order.view(num_slots, blocks_per_slot).tolist()
        self.pool.assign((slot, 0, blocks) for slot, blocks in enumerate(tables))
        self.kv: KVView = self.pool.view()

    def step(
        self,
        parts: Sequence[tuple[int, int, Sequence[int]]],
        *,
        num_padding: int = 0,
        aux_layer_ids: Sequence[int] = (),
    ) -> list[DecoderOutput]:
        """Run (slot, first position, token ids) of several requests as one packed forward.

        Args:
            parts: tokens of a request, at consecutive positions.
            num_padding: inert rows between the first request and the second.
            aux_layer_ids: entries of the residual stream to return.

        Returns:
            The states of each part; padding rows are dropped.
        """
        padding = [(-1, 0, [-1] * num_padding)] if num_padding else []
        padded = [*parts[:1], *padding, *parts[1:]]
        device = self.decoder.device
        ids = torch.tensor([token for *_, tokens in padded for token in tokens], device=device)
        slots = torch.tensor([slot for slot, _, tokens in padded for _ in tokens], device=device)
        positions = torch.tensor(
            [first + i for _, first, tokens in padded for i in range(len(tokens))], device=device
        )
        with torch.no_grad():
            output = self.decoder.forward(
                ids, KVRows.causal(slots, positions), self.kv, aux_layer_ids=aux_layer_ids
            )
        lengths = [len(tokens) for *_, tokens in padded]
        hidden = torch.split(output.hidden, lengths)
        aux = {entry: torch.split(state, lengths) for entry, state in output.aux.items()}
        return [
            DecoderOutput(hidden[i], None, {entry: states[i] for entry, states in aux.items()})
            for i, (slot, *_) in enumerate(padded)
            if slot >= 0
        ]
