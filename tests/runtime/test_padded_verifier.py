"""Padding changes nothing that is decided, whoever scored the rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specreg.ownership import Shard
from specreg.rejection_sampler import RejectionSampler
from specreg.runtime.cuda_graphs import GraphPool, GraphSizes
from specreg.runtime.padded_verifier import PaddedHead, PaddedVerifier
from specreg.runtime.slot_processors import SlotProcessors
from specreg.runtime.slot_state import SlotState
from specreg.runtime.step import Admission
from specreg.runtime.verifier import OwnedBatch, Verified, Verifier

K, V, NUM_SLOTS = 3, 37, 8
CPU = torch.device("cpu")


class Lab:
    """Slots with temperatures and seeds of their own, and logits rows in a buffer."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.state = SlotState(NUM_SLOTS, CPU)
        for slot in range(NUM_SLOTS):
            self.state.admit(Admission(slot, 0.4 * (slot % 4), 0, 1.0, 0.0, seed=slot))
        processors = SlotProcessors(V, CPU, Shard())
        sampler = RejectionSampler(vocab_size=V)
        self.verifier = Verifier(sampler, self.state, processors, None, V)
        self.rows = torch.full((NUM_SLOTS * (K + 1), V + 5), float("nan"))
        self.padded = PaddedVerifier(
            lambda num_rows: self.rows[:num_rows, :V],
            self.verifier,
            self.state,
            None,
            K,
            GraphSizes(sizes),
            GraphPool(),
        )

    def decide(self, slots: list[int], counts: list[int], seed: int) -> tuple[Verified, Verified]:
        """The same batch unpadded and padded."""
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(sum(counts), V, generator=generator)
        drafts = torch.randint(V, (len(slots), K), generator=generator)
        for row, count in enumerate(counts):
            drafts[row, max(0, count - 1) :] = -1
        batch = OwnedBatch(
            torch.tensor(slots),
            torch.tensor([0, *counts]).cumsum(0),
            drafts,
            torch.arange(len(slots)) + 10,
        )
        plain = self.verifier(logits, batch, None)
        self.rows[: len(logits), :V] = logits
        padded = self.padded(
            drafts,
            batch.idx_mapping,
            batch.cu_num_logits,
            batch.positions,
            batch.expanded_idx_mapping,
        )
        return plain, padded


@pytest.mark.parametrize("sizes", [(8,), (1, 2, 5, 8)])
def test_padded_batches_decide_what_unpadded_ones_do(sizes: tuple[int, ...]) -> None:
    lab = Lab(sizes)
    lab.padded.warm_up()
    batches = [
        ([0, 1, 2, 3, 4, 5, 6, 7], [4] * 8),  # what it leaves behind is padding of the next ones
        ([5, 2, 7], [1, 4, 3]),
        ([6], [2]),
        ([3, 1, 4, 0], [0, 1, 0, 4]),  # two in mid-prefill
        ([2, -1, 5], [4, 0, 3]),
        ([1], [0]),
    ]
    num_accepted = 0
    for seed, (slots, counts) in enumerate(batches):
        plain, padded = lab.decide(slots, counts, seed)
        for name, mine, theirs in zip(Verified._fields, padded, plain, strict=True):
            assert torch.equal(mine, theirs), (name, slots)
        num_accepted += int(plain.num_sampled.sum())
    assert num_accepted > len(batches)


def test_the_padded_head_scores_the_rows_that_decide_and_keeps_their_address() -> None:
    def compute_logits(hidden: Tensor) -> Tensor:
        seen.append(hidden.data_ptr())
        return hidden @ torch.ones(4, V)

    seen: list[int] = []
    target: Any = SimpleNamespace(
        hidden_size=4, dtype=torch.float32, device=CPU, compute_logits=compute_logits
    )
    head = PaddedHead(target, 6)
    hidden = torch.arange(20.0).view(5, 4)
    head.fill(hidden, torch.tensor([4, 1]))
    assert torch.equal(head.logits(2), hidden[[4, 1]] @ torch.ones(4, V))
    head.fill(hidden, torch.tensor([0]))
    assert torch.equal(head.logits(2), hidden[[0, 1]] @ torch.ones(4, V))
    assert len(set(seen)) == 1
