"""LiLiCorr: a walk over candidates whose scores a transformer over all of them gives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specreg.errors import CheckpointError
from specreg.speculator import DraftOutput, SpeculatorContext, TargetView
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block
from specreg_dflash.block_speculator import BlockSpeculator
from specreg_dflash.candidates.best_columns import log_normaliser, top_candidates
from specreg_dflash.candidates.walk import walk
from specreg_dflash.candidates.whole_vocabulary import require_whole_vocabulary
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.context_rows import ContextRows
from specreg_dflash.convolution.layer import ConvolvedLayer
from specreg_dflash.layer import BlockLayer
from specreg_dflash.lilicorr.config import LiLiCorrConfig, read_lilicorr
from specreg_dflash.lilicorr.head import LiLiCorrHead

__all__ = ["LiLiCorrSpeculator"]

HEAD = "lilicorr"


class LiLiCorrSpeculator(BlockSpeculator):
    """Mask row j has a few candidates; pairs of neighbours are scored in sight of all of them.

    Attributes:
        config: what was read; there after `load_model`.
        lattice: what scores pairs of candidates; there after `load_model`.
    """

    config: LiLiCorrConfig
    lattice: LiLiCorrHead

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        self._contexts = torch.empty(0)
        self._has_context = torch.zeros(
            context.config.max_num_seqs, dtype=torch.bool, device=context.device
        )

    def read_config(self, form: ConfigForm) -> BackboneConfig:
        self.config = read_lilicorr(form)
        return self.config.backbone

    def make_layer(self, config: BackboneConfig, layer: int) -> BlockLayer:
        convolution = self.config.convolution
        if convolution is None:
            return BlockLayer(config, layer)
        return ConvolvedLayer(config, layer, convolution)

    def make_head(self, config: BackboneConfig) -> nn.Module:
        del config
        self.lattice = LiLiCorrHead(self.config)
        return nn.ModuleDict({HEAD: self.lattice})

    def rename_head_tensor(self, name: str) -> str | None:
        name = name.removeprefix("model.")
        return name if name.startswith(f"{HEAD}.") else None

    def attach_head(self, target: TargetView) -> None:
        require_whole_vocabulary(self.backbone, target)
        self.target_ids = None
        config = self.config.backbone
        if target.hidden_size != config.shape.hidden_size:
            raise CheckpointError(
                "the drafter cannot read the target's embeddings",
                where=f"{config.where}, hidden_size",
                got=f"{config.shape.hidden_size}; allowed: {target.hidden_size}, as the target has "
                "it",
                fix="use a drafter that was trained for this target",
            )
        self.lattice.fold(self.num_speculative_tokens)
        self._target = target
        self._contexts = torch.zeros(
            len(self._has_context),
            config.shape.hidden_size,
            dtype=self.context.dtype,
            device=self.context.device,
        )

    def keep_context(self, context: Tensor, rows: ContextRows) -> None:
        """Keep the state of each request's newest token that the target has read."""
        num_reqs = len(rows.last_rows)
        self._contexts[:num_reqs] = context[rows.last_rows]
        self._has_context[:num_reqs] = rows.has_context

    def propose_block(self, hidden: Tensor, anchors: Tensor, block: Block) -> DraftOutput:
        """Take each row's candidates, score all pairs of neighbours, and walk."""
        assert self.sampler is not None
        num_reqs = len(anchors)
        rows = hidden[:, 1:]
        logits = self.backbone.score(rows)
        ids, values = top_candidates(
            logits, self.config.num_candidates, self.config.backbone.vocab_size
        )
        embedded = self._target.embed(ids.flatten()).view(*ids.shape, -1)
        edges = self.lattice(
            rows,
            embedded.to(rows.dtype),
            values - log_normaliser(logits)[..., None],
            self._contexts[:num_reqs],
            self._has_context[:num_reqs],
        )
        return DraftOutput(walk(self.sampler, ids, edges, self.draft_positions(block)))
