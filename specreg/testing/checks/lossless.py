"""Losslessness: what is emitted is what the target alone would have emitted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specreg.testing.assertions import deviation_sigma
from specreg.testing.calls import CALLS, DISTRIBUTION_PROMPT
from specreg.testing.checks.matrix import combinations, each
from specreg.testing.checks.result import Case, Check
from specreg.testing.lab import Lab
from specreg.testing.observed import Twist
from specreg.testing.packed import PackedRequests
from specreg.testing.settings import Settings
from specreg.testing.turn_engine import Run

__all__ = ["CHECKS"]

SIGMA = 5.0
NUM_SLOTS_MANY = 97
NUM_BATCHED_TOKENS = 1024
# Of the call "many"; their joint law is enumerated, and what follows them is not looked at.
NUM_JUDGED_TOKENS = 3


def greedy(lab: Lab) -> Iterator[Case]:
    """Temperature 0, and 1e-6, give the target's argmaxes in every combination."""

    def problems(settings: Settings) -> Iterator[str]:
        calls = ("greedy", "mixed") if settings == lab.plain(settings.tp) else ("mixed",)
        for call in calls:
            yield from _not_greedy(lab, lab.run(settings, call), call)

    yield from each(lab, combinations(lab), problems)


def greedy_drafts(lab: Lab) -> Iterator[Case]:
    """Drafts that are argmaxes, without a cache, change no token."""

    def problems(settings: Settings) -> Iterator[str]:
        yield from _not_greedy(lab, lab.run(settings, "trio"), "trio")

    yield from each(lab, (lab.plain(tp, drafts="greedy") for tp in lab.tps), problems)


def missing_drafts(lab: Lab) -> Iterator[Case]:
    """Drafts of -1, from none to all of a proposal."""

    def problems(settings: Settings) -> Iterator[str]:
        yield from _not_greedy(lab, lab.run(settings, "trio"), "trio")

    settings = (lab.plain(tp, twist=Twist.DROPPED) for tp in lab.tps)
    yield from each(lab, settings, problems)


def distribution(lab: Lab) -> Iterator[Case]:
    """Pairs of neighbouring tokens follow the target's distribution, enumerated exactly."""

    def problems(settings: Settings) -> Iterator[str]:
        samples = torch.tensor(lab.run(settings, "many").tokens)
        joint = _joint(lab)
        vocab_size = joint.shape[0]
        for first in range(NUM_JUDGED_TOKENS - 1):
            others = [axis for axis in range(joint.dim()) if axis not in (first, first + 1)]
            probs = joint.sum(others).flatten() if others else joint.flatten()
            drawn = samples[:, first] * vocab_size + samples[:, first + 1]
            counts = torch.bincount(drawn, minlength=len(probs))
            sigma = deviation_sigma(counts, probs)
            if sigma > SIGMA:
                yield (
                    f"tokens {first} and {first + 1} of {len(samples)} outputs deviate by "
                    f"{sigma:.1f} sigma; allowed: {SIGMA:g}"
                )

    yield from each(lab, _many(lab), problems)


def acceptance(lab: Lab) -> Iterator[Case]:
    """First drafts are accepted as often as the two distributions say, temperature 0 included."""

    def problems(settings: Settings) -> Iterator[str]:
        calls = ("many",) if settings.max_num_seqs == NUM_SLOTS_MANY else ("greedy", "mixed")
        for call in calls:
            yield from _wrong_acceptance(lab.run(settings, call), call)

    yield from each(lab, (*_many(lab), *(lab.plain(tp) for tp in lab.tps)), problems)


def _many(lab: Lab) -> Iterator[Settings]:
    """One rank with everything; and two, which I2 and the seeds tie to all the others."""
    many = lab.plain(max_num_seqs=NUM_SLOTS_MANY, chunk=NUM_BATCHED_TOKENS)
    for layout in lab.layouts:
        for method in lab.rejection_methods:
            yield replace(many, layout=layout, rejection=method)
    if lab.has_cache and 2 in lab.tps:
        yield replace(many, tp=2)


def _wrong_acceptance(run: Run, call: str) -> Iterator[str]:
    found = [log.acceptance for log in run.logs]
    observed = sum(a.observed for a in found)
    expected = sum(a.expected for a in found)
    spread = math.sqrt(sum(a.variance for a in found)) * SIGMA + 0.5
    if abs(observed - expected) > spread:
        number = sum(a.num_verified for a in found)
        yield (
            f"{call}: {observed} of {number} first drafts were accepted; expected "
            f"{expected:.1f} +- {spread:.1f} ({SIGMA:g} sigma)"
        )


def _not_greedy(lab: Lab, run: Run, call: str) -> Iterator[str]:
    """Greedy requests of a call that leave the baseline where it has no near-tie."""
    baseline = lab.run(Settings(is_baseline=True, max_num_seqs=8), "greedy")
    alone = dict(zip(CALLS["greedy"][0], baseline.tokens, strict=True))
    prompts, params = CALLS[call]
    for prompt, got in enumerate(run.tokens):
        wanted = alone[prompts[prompt]]
        if params[prompt].temperature > 0 or got == wanted:
            continue
        pairs = zip(got, wanted, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(wanted)))
        logits = _next_logits(lab, [[*prompts[prompt], *wanted[:at]]])[0]
        best = logits.topk(2).values
        gap = float(best[0] - best[1])
        if gap >= lab.rounding.smallest_gap:
            yield (
                f"{call}: prompt {prompt} emits {got[at : at + 4]} at token {at}, the target alone "
                f"{wanted[at : at + 4]}; its two best logits are {gap:.2g} apart"
            )


def _joint(lab: Lab) -> Tensor:
    """Probability of the first tokens of the call "many", an axis a token."""
    key = "joint"
    if key not in lab.notes:
        prompt = list(DISTRIBUTION_PROMPT)
        joint = _next_logits(lab, [prompt])[0].softmax(0)
        for _ in range(NUM_JUDGED_TOKENS - 1):
            vocab_size, length = joint.shape[0], joint.dim()
            likely = (joint.flatten() > 0).nonzero().flatten()
            index = torch.stack(torch.unravel_index(likely, joint.shape), 1).tolist()
            probs = _next_logits(lab, [prompt + tokens for tokens in index]).softmax(1)
            following = torch.zeros(vocab_size**length, vocab_size, dtype=torch.float32)
            following[likely] = probs
            joint = (joint.flatten().unsqueeze(1) * following).view(*joint.shape, vocab_size)
        lab.notes[key] = joint
    found: Tensor = lab.notes[key]
    return found


def _next_logits(lab: Lab, prefixes: Sequence[Sequence[int]]) -> Tensor:
    """fp32 `[len(prefixes), V]` of the target alone."""
    target = lab.target(Settings(is_baseline=True, max_num_seqs=8))
    parts = []
    for start in range(0, len(prefixes), 512):
        some = prefixes[start : start + 512]
        packed = PackedRequests(target, len(some), max_model_len=lab.max_model_len)
        states = packed.step([(slot, 0, prefix) for slot, prefix in enumerate(some)])
        hidden = torch.stack([state.hidden[-1] for state in states])
        parts.append(target.compute_logits(hidden).float())
    return torch.cat(parts)


CHECKS = (
    Check("lossless: greedy tokens are the target's", greedy),
    Check("lossless: drafts without a cache change no greedy token", greedy_drafts),
    Check("lossless: missing drafts change no greedy token", missing_drafts),
    Check("lossless: sampled tokens follow the target's distribution", distribution),
    Check("lossless: drafts are accepted as often as they should be", acceptance),
)
