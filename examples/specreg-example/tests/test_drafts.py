"""What is drafted, on a history written by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specreg_example.options import SuffixCountsOptions
from specreg_example.speculator import SuffixCountsSpeculator

from specreg.config import EngineConfig
from specreg.plugin import DraftSetup
from specreg.registry import get_registry
from specreg.speculator import SpeculatorContext

VOCAB_SIZE, K = 10, 3


class GreedySampler:
    """Takes the argmax, and keeps what it was asked."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.positions: list[list[int]] = []

    def sample(self, logits: torch.Tensor, step: int, positions: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits)
        self.positions.append(positions.tolist())
        return logits.argmax(1)


def drafts_behind(history: list[list[int]]) -> tuple[list[list[int]], GreedySampler]:
    speculative = {"method": "suffix_counts", "num_speculative_tokens": K}
    registered = get_registry().speculators
    context = SpeculatorContext(
        spec=next(e.spec for e in registered if e.spec.name == "suffix_counts"),
        config=EngineConfig.parse({"speculative": speculative, "max_num_seqs": 4}),
        setup=DraftSetup(options=SuffixCountsOptions(unseen_mass=0.5)),
        draft_path=None,
        max_model_len=16,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    speculator, sampler = SuffixCountsSpeculator(context), GreedySampler()
    target: Any = SimpleNamespace(vocab_size=VOCAB_SIZE)
    speculator.load_model(target)
    lent: Any = sampler
    speculator.bind(lent, kv=lent)
    inputs: Any = SimpleNamespace(token_history=torch.tensor(history), num_reqs=len(history))
    return speculator.propose(inputs).tokens.tolist(), sampler


def test_what_followed_the_same_tokens_is_drafted_at_its_position():
    drafts, sampler = drafts_behind([[1, 2, 3, 1, 2, 3, 1], [4, 5, 4, 5, 4, -1, -1]])
    assert drafts == [[2, 3, 1], [5, 4, 5]]
    assert sampler.positions == [[7, 5], [8, 6], [9, 7]]


def test_two_tokens_in_common_weigh_more_than_one():
    # After 7 came 1 twice and 2 once; but behind 3, 7 it was 2.
    drafts, _ = drafts_behind([[7, 1, 3, 7, 2, 7, 1, 3, 7]])
    assert drafts[0][0] == 2


def test_a_token_that_was_never_seen_has_its_share_of_the_unseen_mass():
    _, sampler = drafts_behind([[1, 2, 1]])
    first = sampler.logits[0][0]
    assert first[2].item() == pytest.approx(math.log(1 + 0.5 / VOCAB_SIZE), abs=1e-6)
    assert first[9].item() == pytest.approx(math.log(0.5 / VOCAB_SIZE), abs=1e-6)


def test_behind_a_token_seen_for_the_first_time_all_are_alike():
    _, sampler = drafts_behind([[1, 2, 5]])
    assert sampler.logits[0].unique().numel() == 1
