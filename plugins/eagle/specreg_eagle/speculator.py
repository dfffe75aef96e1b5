"""EAGLE heads as speculators: fed with their own states, or all drafts in one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specreg.drafters.self_feeding import DraftStates, SelfFeedingSpeculator
from specreg.errors import CheckpointError
from specreg.speculator import DraftOutput, KVRows, ProposeInputs, SpeculatorContext, TargetView
from specreg.weights import module_bytes
from specreg_eagle.eagle1_head import Eagle1Head, load_eagle1
from specreg_eagle.eagle3_head import Eagle3Head, load_eagle3

__all__ = [
    "EagleSpeculator",
    "ParallelEagleSpeculator",
    "make_eagle1",
    "make_eagle3",
    "make_peagle",
]

Head = Eagle1Head | Eagle3Head
Load = Callable[[SpeculatorContext, TargetView], Head]


class EagleSpeculator(SelfFeedingSpeculator):
    """Drafts with a head that reads the target's states, then its own.

    Args:
        context: of the run.
        load: loads the head.

    Attributes:
        head: once loaded.
    """

    head: Head

    def __init__(self, context: SpeculatorContext, load: Load) -> None:
        super().__init__(context)
        self._load = load

    def load_model(self, target: TargetView) -> None:
        """Load the head. Raises `CheckpointError`, `TensorError`."""
        self.head = self._load(self.context, target)
        self.target_ids = self.head.ends.target_ids
        width = self.head.config.shape.hidden_size
        self.make_buffers(width, width)

    def weight_bytes(self) -> int:
        return module_bytes(self.head)

    def read_target(self, inputs: ProposeInputs) -> Tensor:
        return self.head.read_target(inputs)

    def run(self, token_ids: Tensor, states: Tensor, rows: KVRows) -> DraftStates:
        assert self.kv is not None
        return self.head.forward(token_ids, states, rows, self.kv)

    def score(self, to_score: Tensor) -> Tensor:
        return self.head.score(to_score)


class ParallelEagleSpeculator(EagleSpeculator):
    """Drafts every token in one pass, with rows of a mask token that stand for the drafts before.

    The target's last row predicts draft 0. It is followed by K - 1 rows of the same token and
    state at the next positions, each of which predicts one more draft. Their keys and values are
    written again by the next round before anything can see them.
    """

    head: Eagle3Head

    def load_model(self, target: TargetView) -> None:
        """Load the head, and project the state of the mask rows. Raises as the base class."""
        super().load_model(target)
        num_rows = len(self._slots) * (self.num_speculative_tokens - 1)
        token = _mask_token_id(self.head, target)
        self._mask_ids = torch.full((num_rows,), token, device=self.context.device)
        self._mask_state = self.head.mask_state()

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """Run the mask rows of every request together, and sample the drafts one by one."""
        assert self.sampler is not None
        num_drafts, limit = self.num_speculative_tokens, self.context.max_model_len
        slots, last = self._slots[:num_reqs_padded], self._positions[:num_reqs_padded]
        read = last[:, None] + torch.arange(num_drafts, device=last.device)
        states = self._last.to_score[:num_reqs_padded, None]
        if num_drafts > 1:
            num_rows = num_reqs_padded * (num_drafts - 1)
            positions = read[:, 1:].flatten()
            live = torch.where(read[:, 1:] < limit, slots[:, None], -1).flatten()
            rows = KVRows.causal(live, positions, tuple(range(0, num_rows + 1, num_drafts - 1)))
            masks = self.run(self._mask_ids[:num_rows], self._mask_state.expand(num_rows, -1), rows)
            to_score = masks.to_score.view(num_reqs_padded, num_drafts - 1, -1)
            states = torch.cat([states, to_score], dim=1)
        logits = self.score(states.flatten(0, 1)).view(num_reqs_padded, num_drafts, -1)
        drafts = [
            self.sampler.sample(logits[:, step], step, last + step + 2)
            for step in range(num_drafts)
        ]
        return DraftOutput(torch.stack(drafts, dim=1).masked_fill(read >= limit, -1))


def make_eagle1(context: SpeculatorContext) -> EagleSpeculator:
    """The factory of `eagle`."""
    return EagleSpeculator(context, load_eagle1)


def make_eagle3(context: SpeculatorContext) -> EagleSpeculator:
    """The factory of `eagle3`."""
    return EagleSpeculator(context, load_eagle3)


def make_peagle(context: SpeculatorContext) -> ParallelEagleSpeculator:
    """The factory of `peagle`."""
    return ParallelEagleSpeculator(context, partial(load_eagle3, has_masks=True))


def _mask_token_id(head: Eagle3Head, target: TargetView) -> int:
    token = head.config.mask_token_id
    if token is None or token >= target.vocab_size:
        raise CheckpointError(
            "a head that drafts in parallel has no mask token",
            where=f"{head.config.where}, mask_token_id",
            got=f"{token}; allowed: a token below {target.vocab_size}",
            fix="use the config.json that belongs to the weights",
        )
    return token
