"""MTP modules: a projection of two normalised rows, a decoder layer, a norm, perhaps a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg.drafters.self_feeding import DraftStates
from specreg.nn.decoder_layer import DecoderLayer
from specreg.nn.shape import DecoderShape
from specreg.nn.vocabulary_ends import VocabularyEnds
from specreg.speculator import KVRows, KVView
from specreg_mtp.conventions import Convention

__all__ = ["MTPDrafter", "MTPModule"]


class MTPModule(nn.Module):
    """One module.

    Args:
        convention: how its parts are connected.
        shape: of the decoder layers.
        index: of the module, in `shape.sliding_windows` and in the `KVView`.
        vocab_size: columns of a head of its own.
        device: of the rotary embedding.
    """

    def __init__(
        self,
        convention: Convention,
        shape: DecoderShape,
        index: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden_size = shape.hidden_size
        self.convention = convention
        self.embedding_norm, self.hidden_norm = shape.norm(), shape.norm()
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False, device="meta")
        self.layer = DecoderLayer(shape, index)
        self.final_norm = shape.norm() if "final_norm" in convention.names else nn.Identity()
        if "head" in convention.names:
            self.head = nn.Linear(hidden_size, vocab_size, bias=False, device="meta")
        self.rotary = shape.rotary(device)

    @property
    def has_own_head(self) -> bool:
        """Whether it scores itself. False before weights are loaded."""
        return "head" in self.convention.names and not self.head.weight.is_meta

    def forward(self, embedded: Tensor, states: Tensor, rows: KVRows, kv: KVView) -> DraftStates:
        """Run rows; writes their keys and values.

        Args:
            embedded: `[n, hidden_size]`, embeddings of the rows' tokens.
            states: `[n, hidden_size]`.
            rows: addresses of the rows.
            kv: of the drafter.
        """
        if self.convention.zeroes_first_embedding:
            embedded = torch.where(rows.positions[:, None] == 0, 0, embedded)
        parts = [self.embedding_norm(embedded), self.hidden_norm(states)]
        if self.convention.is_hidden_first:
            parts.reverse()
        stream = self.projection(torch.cat(parts, dim=-1))
        stream = self.layer(stream, self.rotary(rows.positions), rows, kv)
        normed = self.final_norm(stream)
        return DraftStates(normed, stream if self.convention.feeds_stream else normed)


class MTPDrafter(nn.Module):
    """Modules and the ends of the vocabulary that they share.

    Args:
        ends: embedding, and the head of modules that have none of their own.
        steps: the modules.
    """

    def __init__(self, ends: VocabularyEnds, steps: list[MTPModule]) -> None:
        super().__init__()
        self.ends = ends
        self.steps = nn.ModuleList(steps)

    def run(
        self, step: int, token_ids: Tensor, states: Tensor, rows: KVRows, kv: KVView
    ) -> DraftStates:
        """Run rows of `token_ids [n]` and `states [n, hidden_size]` through a module."""
        result: DraftStates = self.steps[step](self.ends.embed(token_ids), states, rows, kv)
        return result

    def score(self, step: int, to_score: Tensor) -> Tensor:
        """Logits `[n, vocab_size]` by a module's head."""
        module = self.steps[step]
        assert isinstance(module, MTPModule)
        if module.has_own_head:
            return F.linear(to_score, module.head.weight)
        return self.ends.score(to_score)
