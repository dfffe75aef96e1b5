"""DSpark: one pass over a block, then steps that the token before biases."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block
from specreg_dflash.block_speculator import BlockSpeculator
from specreg_dflash.config_form import ConfigForm
from torch import Tensor, nn

from specreg.draft_sampler import DraftSampler
from specreg.errors import CheckpointError
from specreg.speculator import DraftOutput, KVView, SpeculatorContext, TargetView
from specreg.weights import Ignored
from specreg_dspark.confidence_head import ConfidenceHead
from specreg_dspark.declarations import MAX_CANDIDATES
from specreg_dspark.dspark_config import DSparkConfig, read_dspark
from specreg_dspark.loop import all_columns, best_columns, shaped, walk
from specreg_dspark.markov_head import MarkovHead, make_markov_head
from specreg_dspark.markov_inputs import MarkovInputs
from specreg_dspark.probe import Probe
from specreg_dspark.sampler_choice import SamplerChoice

__all__ = ["DSparkSpeculator"]

logger = logging.getLogger(__name__)

MARKOV, CONFIDENCE = "markov_head", "confidence_head"


class DSparkSpeculator(BlockSpeculator):
    """The block gives base logits of all drafts, the Markov head their dependence.

    Attributes:
        config: what was read; there after `load_model`.
        markov: the Markov head; there after `load_model`.
        confidence: the confidence head; None where the checkpoint has none.
        num_candidates: columns a step that may be drafted; None is all.
        sampler_choice: the fused sampler that draws, or none; there after `load_model`.
    """

    config: DSparkConfig
    markov: MarkovHead
    sampler_choice: SamplerChoice

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        options = context.options
        self.num_candidates: int | None = None if options is None else options.dspark_draft_topk
        self.confidence: ConfidenceHead | None = None
        self._candidate_ids: Tensor | None = None

    @property
    def num_block_rows(self) -> int:
        """Rows of a request: one a draft, and the anchor's where it gives none."""
        return self.num_speculative_tokens + self.config.first_row

    @property
    def head_dtypes(self) -> Mapping[str, torch.dtype]:
        """fp32 for the confidence head, by name of the tensor in the head, whatever the run's."""
        return {f"{CONFIDENCE}.proj.{name}": torch.float32 for name in ("bias", "weight")}

    def read_config(self, form: ConfigForm) -> BackboneConfig:
        self.config = read_dspark(form)
        key = "sample_from_anchor"
        if form.is_speculators and key not in form.top:
            logger.warning(
                "%s: %s is absent: true is taken, as the library that wrote it does; other readers "
                "take false",
                form.top.where,
                key,
            )
        return self.config.backbone

    def make_head(self, config: BackboneConfig) -> nn.Module:
        del config
        self.markov = make_markov_head(self.config)
        heads: dict[str, nn.Module] = {MARKOV: self.markov}
        if self.config.has_confidence_head:
            heads[CONFIDENCE] = self.confidence = ConfidenceHead(self.config)
        return nn.ModuleDict(heads)

    def rename_head_tensor(self, name: str) -> str | Ignored | None:
        name = name.removeprefix("model.")
        if name.startswith(f"{CONFIDENCE}.") and not self.config.has_confidence_head:
            return Ignored("the config does not enable the confidence head")
        return name if name.startswith((f"{MARKOV}.", f"{CONFIDENCE}.")) else None

    def attach_head(self, target: TargetView) -> None:
        """Check the Markov head against the target. Raises `CheckpointError`."""
        vocab_size = self.backbone.config.vocab_size
        if vocab_size < target.vocab_size:
            raise CheckpointError(
                "the Markov head cannot embed every token of the target",
                where=f"{self.backbone.config.where}, vocab_size",
                got=f"{vocab_size}; allowed: at least {target.vocab_size}",
                fix="use a drafter that was trained for this target",
            )
        if self.num_candidates is not None and self.target_ids is not None:
            self._candidate_ids = self.target_ids.to(self.context.device)
            if self.num_candidates <= MAX_CANDIDATES:
                self.target_ids = None  # candidates carry the target's ids
        probe = Probe.of_head(
            self.context,
            self.config,
            self.markov,
            vocab_size=target.vocab_size,
            target_ids=self.target_ids,
        )
        self.sampler_choice = SamplerChoice(self.context, probe, self._obstacle())
        self.opt_out_reason = self.sampler_choice.opt_out_reason

    def _obstacle(self) -> str:
        """Why no fused sampler can draw for this drafter."""
        if self.config.markov_head != "vanilla":
            return f"its Markov head is {self.config.markov_head}"
        return "" if self.num_candidates is None else "dspark_draft_topk is set"

    def supports_batch_sharded_draft_logits(self) -> bool:
        """Not where the fused sampler in use writes the full-size cache."""
        return super().supports_batch_sharded_draft_logits() and not self.opt_out_reason

    def bind(self, sampler: DraftSampler, kv: KVView) -> None:
        """Keep what the host lends, and hand the door to the fused sampler.

        Args:
            sampler: the one door for sampling.
            kv: the drafter's layers.
        """
        super().bind(sampler, kv)
        self.sampler_choice.bind(sampler)

    def propose_block(self, hidden: Tensor, anchors: Tensor, block: Block) -> DraftOutput:
        """Score all rows, walk, and tell how likely each draft is accepted."""
        first = self.config.first_row
        rows = hidden[:, first : first + self.num_speculative_tokens]
        tokens = self._drafts(rows, anchors, self.draft_positions(block))
        if self.confidence is None:
            return DraftOutput(tokens)
        before = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
        return DraftOutput(tokens, self.confidence(rows, self.markov.embed(before)))

    def base_logits(self, rows: Tensor) -> Tensor:
        """`[num_reqs, num_steps, draft_vocab_size]`, before any bias; equal on all ranks."""
        scored = self.backbone.ends.score(rows.flatten(0, 1))
        return shaped(scored, self.config).view(*rows.shape[:2], -1)

    def _drafts(self, rows: Tensor, anchors: Tensor, positions: Tensor) -> Tensor:
        assert self.sampler is not None
        base = self.base_logits(rows)
        fused = self._fused(self.sampler, base, anchors, positions)
        if fused is not None:
            return fused
        parts = self.sampler, self.markov, self.config, base, positions
        if self.num_candidates is None:
            draw = all_columns(*parts)
        else:
            draw = best_columns(*parts, self.num_candidates, self._candidate_ids)
        return walk(self.markov, rows, anchors, draw)

    def _fused(
        self, sampler: DraftSampler, base: Tensor, anchors: Tensor, positions: Tensor
    ) -> Tensor | None:
        """The drafts of the fused sampler; None when it has done nothing."""
        lent = sampler.lend() if self.sampler_choice.is_active else None
        if lent is None:
            return None
        inputs = MarkovInputs.of(
            lent,
            base_logits=base,
            anchors=anchors,
            positions=positions[:, 0].contiguous(),
            w1=self.markov.markov_w1.weight,
            w2=self.markov.markov_w2.weight,
            scale=self.config.backbone.logit_scale,
            soft_cap=self.config.soft_cap,
        )
        return inputs.tokens if self.sampler_choice.run(inputs) else None
