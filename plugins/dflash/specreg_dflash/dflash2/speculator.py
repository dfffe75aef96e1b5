"""DFlash2: convolutions in the backbone, and a walk over each step's best candidates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specreg.speculator import DraftOutput, TargetView
from specreg.weights import Ignored
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block
from specreg_dflash.block_speculator import BlockSpeculator
from specreg_dflash.candidates.best_columns import Candidates, top_candidates
from specreg_dflash.candidates.walk import walk
from specreg_dflash.candidates.whole_vocabulary import require_whole_vocabulary
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.convolution.layer import ConvolvedLayer
from specreg_dflash.dflash2.config import DFlash2Config, read_dflash2
from specreg_dflash.dflash2.selector import CandidateSelector

__all__ = ["DFlash2Speculator"]

SELECTOR = "candidate_selector"
ENDS = ("embed_tokens.weight", "lm_head.weight")


class DFlash2Speculator(BlockSpeculator):
    """Mask row j has a few candidates; which one is drawn depends on the draft before it.

    Attributes:
        config: what was read; there after `load_model`.
        selector: what scores pairs of candidates; there after `load_model`.
    """

    config: DFlash2Config
    selector: CandidateSelector

    def read_config(self, form: ConfigForm) -> BackboneConfig:
        self.config = read_dflash2(form)
        return self.config.backbone

    def make_layer(self, config: BackboneConfig, layer: int) -> ConvolvedLayer:
        return ConvolvedLayer(config, layer, self.config.convolution)

    def make_head(self, config: BackboneConfig) -> nn.Module:
        self.selector = CandidateSelector(
            config.vocab_size, self.config.rank, config.shape.hidden_size
        )
        return nn.ModuleDict({SELECTOR: self.selector})

    def rename_head_tensor(self, name: str) -> str | Ignored | None:
        name = name.removeprefix("model.")
        if self.config.is_beam and name in ENDS:
            return Ignored("drafters of the Beam kind take the target's")
        if not name.startswith(f"{SELECTOR}."):
            return None
        return name.removesuffix(".weight") if "_codebook" in name else name

    def attach_head(self, target: TargetView) -> None:
        require_whole_vocabulary(self.backbone, target)
        self.target_ids = None

    def propose_block(self, hidden: Tensor, anchors: Tensor, block: Block) -> DraftOutput:
        """Take each row's candidates, score all pairs of neighbours, and walk."""
        assert self.sampler is not None
        rows = hidden[:, 1:]
        candidates = self.candidates(self.backbone.score(rows))
        edges = self.selector(rows, candidates, anchors)
        positions = self.draft_positions(block)
        return DraftOutput(walk(self.sampler, candidates.ids, edges, positions))

    def candidates(self, logits: Tensor) -> Candidates:
        """Candidates of logits `[..., vocab_size]`, with what the config does to these.

        Multiplier and soft cap are monotone, and so the candidates are those of the bare logits.
        """
        config = self.config
        found = top_candidates(logits, config.num_candidates, config.backbone.vocab_size)
        scaled = found.logits * config.output_multiplier
        if config.soft_cap:
            scaled = config.soft_cap * torch.tanh(scaled / config.soft_cap)
        return found._replace(logits=scaled)
