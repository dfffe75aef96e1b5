"""Assertions that say by how much, and where; and what they score for broken samplers."""

from __future__ import annotations

import math

import pytest
import torch

from specreg.testing import assert_close, assert_same_distribution
from specreg.testing.assertions import deviation_sigma

TARGET = torch.tensor([0.05, 0.15, 0.25, 0.25, 0.30])
DRAFT = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04])


def draw(probs: torch.Tensor, number: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probs, number, replacement=True, generator=generator)


def test_correct_samples_pass_and_their_sigmas_are_those_of_a_normal_law():
    found = [
        deviation_sigma(torch.bincount(draw(TARGET, 2000, seed), minlength=5), TARGET)
        for seed in range(400)
    ]
    mean = sum(found) / len(found)
    spread = math.sqrt(sum((x - mean) ** 2 for x in found) / len(found))
    assert abs(mean) < 0.2
    assert abs(spread - 1) < 0.2
    assert max(found) < 5


@pytest.mark.parametrize(
    ("probs", "least"),
    [
        (DRAFT, 30.0),
        (torch.tensor([0.08, 0.15, 0.25, 0.25, 0.27]), 5.0),
    ],
)
def test_samples_of_another_distribution_are_refused_with_the_worst_outcomes(probs, least):
    with pytest.raises(AssertionError, match=r"5000 samples deviate by .* allowed: 5\noutcome 0"):
        assert_same_distribution(draw(probs, 5000), TARGET)
    counts = torch.bincount(draw(probs, 5000), minlength=5)
    assert deviation_sigma(counts, TARGET) > least


def test_an_outcome_that_cannot_happen_is_never_excused():
    assert deviation_sigma(torch.tensor([999, 1]), torch.tensor([1.0, 0.0])) == math.inf
    with pytest.raises(AssertionError, match="outcome 7 of 5 outcomes"):
        assert_same_distribution([7], TARGET)


def test_rare_outcomes_are_pooled():
    probs = torch.cat([torch.tensor([0.9]), torch.full((100,), 0.001)])
    assert_same_distribution(draw(probs, 1000), probs)
    assert deviation_sigma(torch.tensor([5]), torch.tensor([1.0])) == 0


def test_the_worst_coordinates_are_printed():
    got = torch.zeros(2, 3)
    got[1, 2], got[0, 1] = 5.0, 1.0
    with pytest.raises(AssertionError, match=r"2 of 6 .*\nlogits\[1, 2\]: got 5.0, expected 0.0"):
        assert_close(got, torch.zeros(2, 3), atol=0.5, name="logits")


def test_infinities_and_nans_agree_with_themselves_alone():
    special = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert_close(special, special.clone())
    for wrong in ([math.inf, math.inf], [0.0, math.inf], [math.nan, 1.0]):
        with pytest.raises(AssertionError, match="1 of 2 elements"):
            assert_close(
                torch.tensor(wrong), torch.tensor([wrong[0], -2.0 if wrong[1] == 1 else -math.inf])
            )
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.zeros(2), torch.zeros(3))
