"""A standalone language model as drafter."""

from __future__ import annotations

import logging

import torch

from specreg.errors import CheckpointError
from specreg.nn.hf_decoder import HFDecoder
from specreg.speculator import (
    DraftOutput,
    KVRows,
    ProposeInputs,
    SpeculatorBase,
    SpeculatorContext,
    TargetView,
)
from specreg_draft_model.config_keys import unknown_keys
from specreg_draft_model.expanded_prefill import expand_prefill

__all__ = ["DraftModelSpeculator"]

logger = logging.getLogger(__name__)


class DraftModelSpeculator(SpeculatorBase):
    """Drafts K tokens with K passes of a language model that shares the target's vocabulary.

    The first pass reads what the target has just decided and samples draft 1; each further pass
    reads one draft and samples the next. The last draft is never read: if it is accepted, the next
    round's first pass reads it. Beyond the drafter's own positions a request has no drafts.
    """

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        max_num_seqs, device = context.config.max_num_seqs, context.device
        self.max_model_len = context.max_model_len
        self.slots = torch.full((max_num_seqs,), -1, device=device)
        self.positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.hidden: torch.Tensor = torch.empty(0)

    def load_model(self, target: TargetView) -> None:
        """Load the drafter.

        Raises:
            CheckpointError: its vocabulary is not the target's.
        """
        assert self.context.draft_path is not None
        if unknown := unknown_keys(self.context.draft_config):
            logger.warning(
                "%s: config.json has keys that its architecture does not read: %s",
                self.context.draft_path,
                ", ".join(unknown),
            )
        self.model = HFDecoder.load(
            self.context.draft_path, dtype=self.context.dtype, device=self.context.device
        )
        if self.model.vocab_size != target.vocab_size:
            raise CheckpointError(
                "the draft model cannot draft for this target",
                where=f"vocab_size of {self.context.draft_path}",
                got=f"{self.model.vocab_size}; allowed: the target's {target.vocab_size}",
                fix="choose a draft model of the target's family, with the same tokenizer",
            )
        if self.model.max_model_len is not None:
            self.max_model_len = min(self.max_model_len, self.model.max_model_len)
        self.hidden = torch.zeros(
            self.slots.shape[0],
            self.model.hidden_size,
            dtype=self.model.dtype,
            device=self.context.device,
        )

    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def prepare(self, inputs: ProposeInputs) -> None:
        """Read what was decided; keep each request's newest hidden state and position."""
        assert self.kv is not None
        num_reqs = inputs.num_reqs
        prefill = expand_prefill(inputs, self.max_model_len)
        states = self.model.forward(prefill.input_ids, prefill.kv_rows, self.kv)
        self.hidden[:num_reqs] = states.hidden[prefill.last_rows]
        self.positions[:num_reqs] = prefill.last_positions
        self.slots[:num_reqs] = inputs.sample_idx_mapping

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """Sample draft 1 from the prepared states, then one pass a further draft."""
        assert self.kv is not None
        assert self.sampler is not None
        slots, start = self.slots[:num_reqs_padded], self.positions[:num_reqs_padded]
        hidden = self.hidden[:num_reqs_padded]
        drafts: list[torch.Tensor] = []
        for step in range(self.num_speculative_tokens):
            if step > 0:
                positions = start + step
                live = torch.where(positions < self.max_model_len, slots, -1)
                rows = KVRows.causal(live, positions, tuple(range(num_reqs_padded + 1)))
                hidden = self.model.forward(drafts[-1].clamp(min=0), rows, self.kv).hidden
            logits = self.model.compute_logits(hidden)
            drafts.append(self.sampler.sample(logits, step, start + step + 1))
        tokens = torch.stack(drafts, dim=1)
        read = start.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        return DraftOutput(tokens.masked_fill(read >= self.max_model_len, -1))
