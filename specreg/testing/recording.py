"""What a conformance run writes down about each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

__all__ = ["Acceptance", "Cells", "Key", "Proposal", "RankLog"]


class Key(NamedTuple):
    """Which proposal of which request, whatever slot, batch and rank it had.

    Attributes:
        seed: of the request; no two requests of a call share one.
        tokens: that the request has so far: what the proposal may depend on.
    """

    seed: int
    tokens: tuple[int, ...]

    @property
    def position(self) -> int:
        """Of the first draft."""
        return len(self.tokens)


class Cells(NamedTuple):
    """The cached cells of one request after a proposal: `[num_speculative_tokens, ...]` each."""

    logits: Tensor
    temperature: Tensor
    logsumexp: Tensor
    state: Tensor


@dataclass
class Proposal:
    """One call of `propose`.

    Attributes:
        keys: of the batch rows that sample; None for the others.
        slots: request state index of each batch row.
        tokens: int64 `[num_reqs, num_speculative_tokens]`, as the speculator returned them.
        logits: fp32 `[num_reqs, num_speculative_tokens, vocab_size]` that it sampled from, NaN
            where it did not; None without a sampler call.
        cells: what this rank's cache holds, by slot, of the requests that it owns.
    """

    keys: list[Key | None]
    slots: list[int]
    tokens: Tensor
    logits: Tensor | None
    cells: dict[int, Cells] = field(default_factory=dict)


@dataclass
class Acceptance:
    """First drafts of proposals: how many were accepted, and how many ought to have been.

    Attributes:
        num_verified: first drafts that were verified.
        observed: of these, accepted.
        expected: sum of their probabilities of acceptance.
        variance: of the number accepted.
    """

    num_verified: int = 0
    observed: int = 0
    expected: float = 0.0
    variance: float = 0.0


@dataclass
class RankLog:
    """One rank's record of one `generate` call.

    Attributes:
        rank: whose.
        proposals: in order.
        violations: broken promises by kind: `"bytes"`, `"door"`, `"store"`, `"output"`, `"kv"`,
            `"sync"`.
        acceptance: of standard verification.
        newest_logits: by slot, what the first draft of the last proposal was sampled from; None
            where it was not sampled.
        idle_steps: verification calls without a request of this rank.
    """

    rank: int
    proposals: list[Proposal] = field(default_factory=list)
    violations: dict[str, list[str]] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=Acceptance)
    newest_logits: dict[int, Tensor | None] = field(default_factory=dict)
    idle_steps: int = 0

    def violate(self, kind: str, lines: list[str]) -> None:
        """Add broken promises."""
        if lines:
            self.violations.setdefault(kind, []).extend(lines)
