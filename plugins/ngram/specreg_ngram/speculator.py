"""Prompt look-up as a speculator."""

from __future__ import annotations

import torch

from specreg.errors import ConfigError
from specreg.speculator import (
    DraftOutput,
    ProposeInputs,
    SpeculatorBase,
    SpeculatorContext,
    TargetView,
)
from specreg_ngram.lookup import look_up
from specreg_ngram.options import NgramOptions

__all__ = ["NgramSpeculator"]


class NgramSpeculator(SpeculatorBase):
    """Proposes what followed the newest tokens of a request when they stood there before.

    It has neither weights nor KV nor anything to keep between rounds: a proposal is a function of
    the request's tokens. A draft is a single guess without a distribution, and verified as such.

    Raises:
        ConfigError: a draft checkpoint is configured.
    """

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        if context.draft_path is not None:
            raise ConfigError(
                "prompt look-up has no draft checkpoint",
                where="speculative_config.model",
                got=f"{context.draft_path!r}; allowed: null",
                fix="remove the key, or choose the method that the checkpoint is for",
            )
        assert isinstance(context.options, NgramOptions)
        self.min_length, self.max_length = context.options.lengths
        self.max_model_len = context.max_model_len

    def load_model(self, target: TargetView) -> None:
        """There is nothing to load."""

    def weight_bytes(self) -> int:
        return 0

    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        """Look up every request of the batch; -1 for one that samples nothing."""
        history = inputs.token_history
        assert history is not None
        drafts = look_up(history, self.min_length, self.max_length, self.num_speculative_tokens)
        num_tokens = (history >= 0).sum(1, keepdim=True)
        positions = num_tokens + torch.arange(drafts.shape[1], device=drafts.device)
        is_wanted = (inputs.sample_idx_mapping >= 0).unsqueeze(1) & (positions < self.max_model_len)
        return DraftOutput(drafts.masked_fill(~is_wanted, -1))
