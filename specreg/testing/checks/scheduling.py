"""What the host may do to requests without changing a token or a draft."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specreg.ownership import owner_of
from specreg.testing.checks.matrix import (
    combinations,
    compare_drafts,
    each,
    same_bits,
    same_tokens,
    violations,
)
from specreg.testing.checks.result import Case, Check, not_run, passed, verdict
from specreg.testing.lab import Lab
from specreg.testing.observed import Twist
from specreg.testing.settings import Settings
from specreg.testing.turn_engine import Run

__all__ = ["CHECKS"]

CHUNK = 9
ALL_KINDS = ("bytes", "door", "store", "kv", "output")


def _like(lab: Lab, run: Run, reference: Run) -> list[str]:
    """Tokens and drafts of runs whose forward passes have other shapes."""
    return [
        *violations(run, *ALL_KINDS),
        *same_tokens(run, reference, num_rounded=lab.rounding.num_requests),
        *compare_drafts(run, reference, share_rounded=lab.rounding.share_drafts),
    ]


def agreement(lab: Lab) -> Iterator[Case]:
    """Every rank proposes the same drafts."""

    def problems(settings: Settings) -> Iterator[str]:
        first, *others = lab.run(settings, "mixed").logs
        for log in others:
            for step, proposal in enumerate(log.proposals):
                if not torch.equal(proposal.tokens, first.proposals[step].tokens):
                    yield f"proposal {step}: rank {log.rank} differs from rank 0"
                    return

    yield from each(lab, combinations(lab), problems)


def chunked(lab: Lab) -> Iterator[Case]:
    """A prompt read in pieces drafts as one read whole."""

    def problems(settings: Settings) -> list[str]:
        return _like(lab, lab.run(settings, "mixed"), lab.run(lab.plain(settings.tp), "mixed"))

    yield from each(lab, (lab.plain(tp, chunk=CHUNK) for tp in lab.tps), problems)


def preempted(lab: Lab) -> Iterator[Case]:
    """A request that loses its slot goes on in another one, with another owner.

    Greedy requests: one that comes back has lost its drafts, and a token that is drawn without a
    draft is another draw from the same distribution.
    """
    for tp in lab.tps:
        run = lab.run(lab.plain(tp, num_kv_blocks=lab.blocks_per_request), "crowded")
        if not run.stats.num_preemptions:
            yield not_run(f"tp {tp}", "nobody was preempted")
        elif tp > 1 and not _changes_of_owner(run, tp):
            yield not_run(f"tp {tp}", "who was preempted came back to the same owner")
        else:
            yield verdict(f"tp {tp}", _like(lab, run, lab.run(lab.plain(tp), "crowded")))


def _changes_of_owner(run: Run, tp: int) -> int:
    owners: dict[int, int] = {}
    changes = 0
    for proposal in run.logs[0].proposals:
        for slot, key in zip(proposal.slots, proposal.keys, strict=True):
            if key is not None:
                owner = owner_of(slot, tp)
                changes += owners.get(key.seed, owner) != owner
                owners[key.seed] = owner
    return changes


def reused(lab: Lab) -> Iterator[Case]:
    """I6, `release`: a slot that others have had drafts bit for bit as a fresh one does."""

    def problems(settings: Settings) -> Iterator[str]:
        fresh = lab.run(settings, "alone")
        for call in ("greedy", "mixed"):
            lab.run(settings, call)
        again = lab.run(settings, "alone again")
        yield from compare_drafts(again, fresh)
        yield from same_tokens(again, fresh)
        for old, new in zip(fresh.logs[0].proposals, again.logs[0].proposals, strict=False):
            if (
                old.logits is not None
                and new.logits is not None
                and not same_bits(old.logits, new.logits)
            ):
                yield f"draft logits at {old.keys} differ from those of a fresh engine"
                return

    yield from each(lab, (lab.plain(tp) for tp in lab.tps), problems)


def seeds_and_batch(lab: Lab) -> Iterator[Case]:
    """A request's seed decides its tokens and drafts, whatever shares its batch."""
    for tp in lab.tps:
        settings = lab.plain(tp)
        mixed, alone = lab.run(settings, "mixed"), lab.run(settings, "alone")
        lines = [] if alone.tokens[0] == mixed.tokens[3] else ["another output than in a batch"]
        lines += compare_drafts(alone, mixed, share_rounded=lab.rounding.share_drafts)
        yield verdict(f"tp {tp}, alone and in a batch", lines)
        turned = lab.run(lab.plain(tp, twist=Twist.REVERSED), "mixed")
        yield verdict(f"tp {tp}, rows in reverse order", _like(lab, turned, mixed))


def seeds_and_ranks(lab: Lab) -> Iterator[Case]:
    """The number of ranks changes no token."""
    first, *others = lab.tps
    if not others:
        yield not_run("tp against tp", "needs two values of tp")
        return
    reference = lab.run(lab.plain(first), "mixed")
    for tp in others:
        yield verdict(
            f"tp {tp} as tp {first}", _like(lab, lab.run(lab.plain(tp), "mixed"), reference)
        )


def layouts(lab: Lab) -> Iterator[Case]:
    """I7: the layout changes no draft."""
    first, *others = lab.layouts
    if not others:
        yield passed("one layout")
        return
    for tp in lab.tps:
        reference = lab.run(lab.plain(tp, layout=first), "mixed")
        for layout in others:
            run = lab.run(lab.plain(tp, layout=layout), "mixed")
            lines = same_tokens(run, reference) + compare_drafts(run, reference)
            yield verdict(f"tp {tp}, {layout} as {first}", lines)


def idle_rank(lab: Lab) -> Iterator[Case]:
    """Ranks that own nothing take part; with fewer slots than ranks nothing is sharded."""
    several = [tp for tp in lab.tps if tp > 1]
    if not several:
        yield not_run("an idle rank", "needs a tp above 1; allowed: --tp 2")
    for tp in several:
        run = lab.run(lab.plain(tp), "alone")
        lines = violations(run, *ALL_KINDS)
        if not any(log.idle_steps for log in run.logs):
            lines.append("every rank had a request to verify")
        yield verdict(f"tp {tp}, one request", lines)
        few = lab.run(lab.plain(tp, max_num_seqs=tp - 1), "trio")
        assert few.plan is not None
        lines = violations(few, *ALL_KINDS)
        if few.plan.num_shards != 1:
            lines.append(f"{few.plan.num_shards} shards; allowed: 1")
        yield verdict(f"tp {tp}, {tp - 1} slots", lines)


CHECKS = (
    Check("ranks: all propose the same drafts", agreement),
    Check("ranks: a rank that owns nothing", idle_rank),
    Check("scheduling: chunked prefill drafts as unchunked", chunked),
    Check("scheduling: preempted requests resume elsewhere", preempted),
    Check("scheduling: release leaves nothing behind in a slot", reused),
    Check("seeds: independent of the batch", seeds_and_batch),
    Check("seeds: independent of the number of ranks", seeds_and_ranks),
    Check("layouts: tokens do not depend on them", layouts),
)
