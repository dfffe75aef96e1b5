"""One MTP module, applied again to what it gave."""

from __future__ import annotations

from torch import Tensor

from specreg.drafters.self_feeding import DraftStates, SelfFeedingSpeculator
from specreg.speculator import KVRows, ProposeInputs, SpeculatorContext, TargetView
from specreg.weights import module_bytes
from specreg_mtp.checkpoint import MTPCheckpoint

__all__ = ["SingleModuleSpeculator"]


class SingleModuleSpeculator(SelfFeedingSpeculator):
    """Drafts K tokens with K passes of one module.

    Args:
        context: of the run.
        checkpoint: where the module is.
    """

    def __init__(self, context: SpeculatorContext, checkpoint: MTPCheckpoint) -> None:
        super().__init__(context)
        self.checkpoint = checkpoint
        self.tensors_of_target = checkpoint.tensors_of_target

    def load_model(self, target: TargetView) -> None:
        """Load the module. Raises `CheckpointError`."""
        self.drafter = self.checkpoint.load(target)
        self.make_buffers(target.hidden_size, target.hidden_size)

    def weight_bytes(self) -> int:
        return module_bytes(self.drafter)

    def read_target(self, inputs: ProposeInputs) -> Tensor:
        """The target's states `[num_tokens, hidden_size]`: the module normalises them."""
        assert inputs.hidden_states is not None
        return inputs.hidden_states

    def run(self, token_ids: Tensor, states: Tensor, rows: KVRows) -> DraftStates:
        """One pass of the module; shapes as of `SelfFeedingSpeculator.run`."""
        assert self.kv is not None
        return self.drafter.run(0, token_ids, states, rows, self.kv)

    def score(self, to_score: Tensor) -> Tensor:
        """Logits `[n, vocab_size]` over the target's vocabulary."""
        return self.drafter.score(0, to_score)
