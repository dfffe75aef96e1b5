"""Each check can fail: toys that break one promise are refuted by the check of that promise."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from specreg.testing import CHECKS
from specreg.testing.checks.result import Status


def result_of(lab, name):
    (check,) = [check for check in CHECKS if check.name == name]
    return check.run(lab)


def broken_promises(lab, checks):
    results = [check.run(lab) for check in checks]
    return [(result.check, result.reasons) for result in results if not result.is_ok]


@pytest.mark.parametrize(
    ("toy_name", "check", "reason"),
    [
        (
            "WritesFullRows",
            "cache: only rows of sampled, owned requests are written",
            r"rank \d of 2 wrote \d+ bytes of draft_logits.logits that it must not touch, the "
            r"first: byte \d+ of row \d+ \(slot \d\), step 0",
        ),
        (
            "WritesBehindTheEnd",
            "cache: only rows of sampled, owned requests are written",
            "the row 1 behind the cache, step 0",
        ),
        (
            "WritesForPadding",
            "cache: padding rows are inert",
            r"rank 0 of 1 wrote \d+ bytes of draft_logits.logits",
        ),
        ("DiffersOnOneRank", "ranks: all propose the same drafts", "rank-divergence"),
        (
            "KeepsStateOfTheDead",
            "scheduling: release leaves nothing behind in a slot",
            "draft logits at .* differ from those of a fresh engine|proposals differ",
        ),
        ("DependsOnTheBatchRow", "seeds: independent of the batch", "rows in reverse order: "),
        (
            "HasItsOwnDice",
            "protocol: drafts come through the sampler",
            "but DraftSampler.sample drew|rank-divergence",
        ),
        (
            "TakesTheArgmax",
            "protocol: drafts come through the sampler",
            r"draft \d of slot \d is \d+, but DraftSampler.sample drew \d+; fused",
        ),
        ("TakesTheArgmax", "lossless: sampled tokens follow the target's distribution", "sigma"),
        (
            "StoresNothing",
            "lossless: drafts are accepted as often as they should be",
            "0 of .* first drafts were accepted",
        ),
        (
            "CallsTheOpItself",
            "protocol: drafts come through the sampler",
            "DraftSampler.sample drew nothing there; fused sampling is not declared",
        ),
        (
            "BorrowsTheCache",
            "protocol: drafts come through the sampler",
            "samples in its own kernels and does not declare it",
        ),
        ("StoresOtherLogits", "lossless: drafts are accepted as often as they should be", "sigma"),
        ("StoresOtherLogits", "protocol: drafts come through the sampler", "other logits"),
        (
            "AnswersInFloats",
            "protocol: shape, type and range of drafts",
            r"tokens of torch.float32 .* allowed: torch.int64",
        ),
        ("TakesOtherArguments", "protocol: methods and signatures", "cannot be called as release"),
        (
            "WaitsForTheDevice",
            "capabilities: is_cuda_graph_safe",
            "draft.. calls Tensor.item: it waits for the device",
        ),
        (
            "WithdrawsAtLoad",
            "capabilities: honors_owner_mask",
            "supports_batch_sharded_draft_logits.. of speculator WithdrawsAtLoad is False",
        ),
    ],
)
def test_a_broken_promise_is_refuted_and_explained(toy, toy_name, check, reason):
    tps = (1,) if check.startswith("lossless") else (1, 2)
    result = result_of(toy(toy_name, tps), check)
    assert not result.is_ok
    assert any(re.search(reason, line) for line in result.reasons), result.reasons


def test_an_honest_toy_keeps_every_promise(toy):
    assert broken_promises(toy("Bigrams"), CHECKS) == []


@pytest.mark.parametrize(
    "toy_name", ["Unmasked", "GreedyOnly", "SaysFullCache", "Reduced", "Candidates"]
)
def test_what_an_honest_toy_declares_is_used_and_all_else_refused(toy, toy_name):
    groups = ("capabilities", "cache", "layouts", "protocol: drafts", "lossless: greedy")
    checks = [check for check in CHECKS if check.name.startswith(groups)]
    assert broken_promises(toy(toy_name), checks) == []


@pytest.mark.parametrize("toy_name", ["Reduced", "Candidates"])
def test_drafts_of_part_of_the_vocabulary_are_lossless_in_every_layout(toy, toy_name):
    lab = toy(toy_name, (1,))
    assert len(lab.layouts) == 2
    checks = [check for check in CHECKS if check.name.startswith("lossless")]
    assert broken_promises(lab, checks) == []


def test_a_case_that_cannot_run_fails_unless_it_is_declared(toy):
    name = "capabilities: honors_owner_mask"
    lab = toy("WithdrawsAtLoad")
    assert result_of(lab, name).status is Status.NOT_RUN
    lab.subject = replace(lab.subject, declared={name: "the fused kernel needs the whole cache"})
    result = result_of(lab, name)
    assert result.status is Status.DECLARED
    assert result.is_ok
    assert result.reasons
