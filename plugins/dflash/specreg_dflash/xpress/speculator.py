"""XPress: all drafts from one pass, then refined together until they fit each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specreg.errors import CheckpointError
from specreg.speculator import DraftOutput, SpeculatorContext, TargetView
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block
from specreg_dflash.block_speculator import BlockSpeculator
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.xpress.config import RefinerConfig, num_candidates, read_xpress
from specreg_dflash.xpress.refiner import KeptColumns, Refiner, refinements

__all__ = ["XPressSpeculator"]

# Names in `Refiner` of a file's tensors, by prefix of the form; others are the same.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "xpress_head.": {
        "w1.weight": "token_embed.weight",
        "w2.weight": "readout.weight",
        "mix.L": "mix_l",
    },
    "refiner_head.": {
        "mlp_gate.weight": "mlp.gate_proj.weight",
        "mlp_up.weight": "mlp.up_proj.weight",
        "mlp_down.weight": "mlp.down_proj.weight",
    },
}
# Rows of the readout that are gathered at a time when candidates are limited, in elements.
MAX_GATHERED = 1 << 26


class XPressSpeculator(BlockSpeculator):
    """Drafts are the fixed point of passes over the block, each an argmax of refined scores."""

    refiner: RefinerConfig

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        self.num_candidates = 0
        self._prefix = ""

    def read_config(self, form: ConfigForm) -> BackboneConfig:
        backbone, self.refiner = read_xpress(form)
        self._prefix = "refiner_head." if form.is_speculators else "xpress_head."
        self.num_candidates = num_candidates(self.refiner, self.context.options)
        return backbone

    def make_head(self, config: BackboneConfig) -> nn.Module:
        return Refiner(self.refiner, config.shape.hidden_size, config.vocab_size)

    def rename_head_tensor(self, name: str) -> str | None:
        for prefix, aliases in ALIASES.items():
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                return aliases.get(name, name)
        return None

    def head_file_name(self, name: str) -> str:
        theirs = {ours: alias for alias, ours in ALIASES[self._prefix].items()}
        return self._prefix + theirs.get(name, name)

    def attach_head(self, target: TargetView) -> None:
        """Fold the mixer. Raises `CheckpointError` for a refiner of another vocabulary."""
        vocab_size = self.backbone.config.vocab_size
        if vocab_size != target.vocab_size:
            raise CheckpointError(
                "the refiner is for another vocabulary",
                where=f"{self.backbone.config.where}, vocab_size",
                got=f"{vocab_size}; allowed: the target's {target.vocab_size}",
                fix="use a drafter that was trained for this target",
            )
        self._refiner().fold_mixer()

    def propose_block(self, hidden: Tensor, anchors: Tensor, block: Block) -> DraftOutput:
        """Refine, and take the highest columns of the last pass.

        The anchor's row takes the anchor itself for the token before it, as in serving elsewhere.
        More passes than drafts change nothing.
        """
        assert self.sampler is not None
        base = self.backbone.score(hidden[:, 1:])
        num_reqs, num_drafts, vocab_size = base.shape
        num_passes = min(self.refiner.num_passes, num_drafts)
        num_reqs_at_once = num_reqs
        if 0 < self.num_candidates < vocab_size:
            gathered = num_drafts * self.num_candidates * self.refiner.rank
            num_reqs_at_once = max(1, MAX_GATHERED // gathered)
        scores = []
        for first in range(0, num_reqs, num_reqs_at_once):
            part = slice(first, first + num_reqs_at_once)
            kept = KeptColumns.of(base[part], self.num_candidates)
            *_, last = refinements(
                self._refiner(),
                hidden[part],
                kept,
                anchors[part],
                anchors[part],
                num_passes=num_passes,
            )
            scores.append(kept.spread(last, vocab_size))
        drafts = self.sampler.sample_block(torch.cat(scores), self.draft_positions(block))
        return DraftOutput(drafts)

    def _refiner(self) -> Refiner:
        assert isinstance(self.head, Refiner)
        return self.head
