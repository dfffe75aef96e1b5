"""The cache: who writes what, and what it holds afterwards (invariants I1, I2, I4, I6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specreg.draft_logits import CELL_BARE, CELL_EMPTY
from specreg.testing.checks.matrix import combinations, each, same_bits, same_tokens, violations
from specreg.testing.checks.result import Case, Check, not_run, passed, verdict
from specreg.testing.lab import Lab
from specreg.testing.observed import Twist
from specreg.testing.recording import Cells
from specreg.testing.settings import Settings

__all__ = ["CHECKS"]


def owned_rows(lab: Lab) -> Iterator[Case]:
    """I1: no byte of a row changes whose request was not sampled, or has another owner."""
    if not lab.has_cache:
        yield passed("there is no cache")
        return

    def problems(settings: Settings) -> list[str]:
        calls = ("alone", "mixed")
        return [line for call in calls for line in violations(lab.run(settings, call), "bytes")]

    yield from each(lab, combinations(lab), problems)


def foreign_keys_and_values(lab: Lab) -> Iterator[Case]:
    """Drafting writes draft KV of its own requests only."""

    def problems(settings: Settings) -> list[str]:
        return violations(lab.run(settings, "mixed"), "kv")

    yield from each(lab, (lab.plain(tp) for tp in lab.tps), problems)


def union(lab: Lab) -> Iterator[Case]:
    """I2: the shards hold the replicated cache, bit for bit, with as many collectives."""
    # How drafts are judged does not change what is stored.
    methods = lab.rejection_methods[:1]
    sharded = [s for s in combinations(lab) if s.tp > 1 and s.rejection in methods]
    if not lab.has_cache:
        yield passed("there is no cache")
        return
    if not sharded:
        yield not_run("sharded against replicated", "needs a tp above 1; allowed: --tp 2")
        return

    def problems(settings: Settings) -> Iterator[str]:
        run = lab.run(settings, "mixed")
        whole = lab.run(replace(settings, sharding="off"), "mixed")
        assert run.plan is not None
        yield from same_tokens(run, whole)
        for counter in ("num_collectives", "num_accepted_by_position", "num_steps"):
            got, wanted = getattr(run.stats, counter), getattr(whole.stats, counter)
            if got != wanted:
                yield f"{counter} is {got}; replicated: {wanted}"
        for step, proposal in enumerate(whole.logs[0].proposals):
            parts: dict[int, Cells] = {}
            for log in run.logs:
                parts |= log.proposals[step].cells
            if parts.keys() != proposal.cells.keys():
                yield f"proposal {step}: slots {sorted(parts)}; allowed: {sorted(proposal.cells)}"
                return
            for slot, cells in proposal.cells.items():
                for name, got, wanted in zip(Cells._fields, parts[slot], cells, strict=True):
                    compared = cells.state != CELL_EMPTY
                    if name == "logsumexp":  # of bare cells it is still to be computed
                        compared &= cells.state != CELL_BARE
                    if not same_bits(got[compared], wanted[compared]):
                        yield f"proposal {step}, slot {slot}: {name} differs from the replicated"
                        return

    yield from each(lab, sharded, problems)


def padding(lab: Lab) -> Iterator[Case]:
    """I4: padding rows change nothing, and nothing is written for them."""
    for tp in lab.tps:
        settings = lab.plain(tp, twist=Twist.PADDED)
        run, plain = lab.run(settings, "pair"), lab.run(lab.plain(tp), "pair")
        problems = violations(run, "bytes", "door", "store", "kv", "output")
        yield verdict(
            f"tp {tp}", problems + same_tokens(run, plain, num_rounded=lab.rounding.num_requests)
        )


CHECKS = (
    Check("cache: only rows of sampled, owned requests are written", owned_rows),
    Check("cache: keys and values of other requests stay", foreign_keys_and_values),
    Check("cache: the shards together are the replicated cache", union),
    Check("cache: padding rows are inert", padding),
)
