"""Every family's module against one that is written out again: no caches, no shared code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mtp_families import FAMILIES, KV_HEADS
from mtp_harness import Harness
from mtp_reference import Facts, recursion
from torch import Tensor

from specreg.capabilities import HiddenStates

PROMPT = (3, 9, 1, 14, 5, 5, 12, 2)
# Accepted drafts of each round, and the token that verification adds.
ROUNDS = ((2, 6), (0, 11), (3, 1), (1, 7), (3, 3), (0, 0))
# A wrong connection changes logits by far more than rounding does; see the last test.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def expected(
    harness: Harness, weights: dict[str, Tensor], facts: Facts, number: int
) -> tuple[list[int], Tensor]:
    target = harness.target
    states = target.states(harness.tokens[:-1])
    return recursion(
        weights,
        facts,
        harness.tokens,
        states,
        target.embedding,
        target.head,
        harness.num_steps,
        KV_HEADS,
        number,
    )


def harness_of(name: str, tmp_path: Path) -> tuple[Harness, dict[str, Tensor]]:
    """A harness that applies the first of a family's modules again and again."""
    family = FAMILIES[name]
    single = replace(
        family,
        numbers=family.numbers[:1],
        config={**family.config, "num_nextn_predict_layers": 1},
    )
    weights = single.save(tmp_path)
    return Harness({"method": "mtp", "model": str(tmp_path)}), weights


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_those_of_a_recompute_without_a_cache(
    name: str, chunk: int | None, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    harness, weights = harness_of(name, tmp_path)
    assert harness.spec.name == "mtp"
    wants = HiddenStates.PRE_NORM if family.is_pre_norm else HiddenStates.POST_NORM
    assert harness.needs.hidden_states is wants
    logits = harness.prompt(PROMPT, 4, chunk)
    for num_accepted, newest in (*ROUNDS, (0, 0)):
        drafts, wanted = expected(harness, weights, family.facts, family.numbers[0])
        torch.testing.assert_close(logits, wanted, **TOLERANCE)
        assert harness.drafts == drafts
        logits = harness.verified(num_accepted, newest)


@pytest.mark.parametrize(
    "broken",
    ["is_hidden_first", "feeds_stream", "zeroes_first", "one_plus"],
)
@pytest.mark.parametrize("name", ["qwen3_next", "mimo", "glm", "step", "deepseek"])
def test_every_connection_of_the_table_shows_in_the_logits(
    name: str, broken: str, tmp_path: Path
) -> None:
    facts = FAMILIES[name].facts
    harness, weights = harness_of(name, tmp_path)
    logits = harness.prompt(PROMPT[:4], 4)  # short enough for the row of position 0 to be seen
    wrong = replace(facts, **{broken: not getattr(facts, broken)})
    _, unlike = expected(harness, weights, wrong, FAMILIES[name].numbers[0])
    assert (logits - unlike).abs().max() > 0.02
