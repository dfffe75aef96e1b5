"""Row arithmetic without the question who owns the request."""

from __future__ import annotations

from specreg_example.speculator import SuffixCountsSpeculator

from specreg.speculator import DraftOutput, ProposeInputs

__all__ = ["CarelessSpeculator"]


class CarelessSpeculator(SuffixCountsSpeculator):
    """Rewrites the cached row of every request, those of other ranks included."""

    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        output = super().propose(inputs)
        if self.draft_logits is not None:
            slots = inputs.sample_idx_mapping
            rows = slots[slots >= 0] // self.draft_logits.num_shards
            self.draft_logits.logits[rows, 0] = 0.0
        return output
