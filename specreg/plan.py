"""The plan of a run's draft-logits cache: how it is sharded, what it weighs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specreg.capabilities import DraftLogitsLayout
from specreg.memory import GIB, CacheSize
from specreg.specs import PolicyInputs, PolicyRule, Verdict

__all__ = ["DraftLogitsPlan"]

_ANSWERS = {True: "yes", False: "no", None: "at loading"}


@dataclass(frozen=True)
class DraftLogitsPlan:
    """How a rank keeps draft logits. Made by `specreg.policy`.

    Attributes:
        inputs: what it was made from; `inputs.config.speculative` has method and K filled in.
        rules: the rules that apply, in the order of `verdicts`.
        method, speculator, distribution: what was asked for or detected, and what serves it.
        tensor_parallel_size: ranks of the run.
        max_num_seqs: slots of the run.
        num_speculative_tokens: K.
        vocab_size: the target's; 0 when it is unknown, which only a plan without a cache may be.
        draft_vocab_size, num_candidates: as the speculator's capabilities say.
        num_shards: ranks that share the requests; 1, or `tensor_parallel_size`.
        shard_idx: which shard this rank holds.
        rows_per_rank: rows that a rank allocates; 0 without a cache.
        layout: what a (row, step) holds; None without a cache.
        dtype: element type of the logits by name; None without a cache.
        shape: `(rows, num_speculative_tokens, width)` of the logits; empty without a cache.
        bytes_per_rank: of the logits array alone.
        side_bytes_per_rank: of statistics, ids and tables.
        replicated_bytes_per_rank: what `bytes_per_rank` would be with one shard.
        possible_layouts: size a rank of every layout that the speculator writes and the rejection
            sampler reads.
        provisional: made before loading; rules that loading decides are taken to hold.
        verdicts: what each rule says, in order.
    """

    inputs: PolicyInputs = field(repr=False, compare=False)
    rules: tuple[PolicyRule, ...] = field(repr=False, compare=False)
    method: str
    speculator: str
    distribution: str
    tensor_parallel_size: int
    max_num_seqs: int
    num_speculative_tokens: int
    vocab_size: int
    draft_vocab_size: int | None
    num_candidates: int | None
    num_shards: int
    shard_idx: int
    rows_per_rank: int
    layout: DraftLogitsLayout | None
    dtype: str | None
    shape: tuple[int, ...]
    bytes_per_rank: int
    side_bytes_per_rank: int
    replicated_bytes_per_rank: int
    possible_layouts: Mapping[DraftLogitsLayout, CacheSize]
    provisional: bool
    verdicts: tuple[Verdict, ...]

    @property
    def has_cache(self) -> bool:
        """Whether anything is allocated."""
        return self.layout is not None

    @property
    def freed_bytes_per_rank(self) -> int:
        """What a rank saves on the logits array by sharding it."""
        return self.replicated_bytes_per_rank - self.bytes_per_rank

    @property
    def failed_verdicts(self) -> tuple[Verdict, ...]:
        """Verdicts of the rules that do not hold."""
        return tuple(verdict for verdict in self.verdicts if verdict.passed is False)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON takes it."""
        return {
            "method": self.method,
            "speculator": self.speculator,
            "distribution": self.distribution,
            "num_shards": self.num_shards,
            "rows_per_rank": self.rows_per_rank,
            "layout": self.layout.value if self.layout else None,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bytes_per_rank": self.bytes_per_rank,
            "side_bytes_per_rank": self.side_bytes_per_rank,
            "replicated_bytes_per_rank": self.replicated_bytes_per_rank,
            "freed_bytes_per_rank": self.freed_bytes_per_rank,
            "provisional": self.provisional,
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
        }

    def explain(self) -> str:
        """The plan in words: a line a rule, then what is allocated and what it could have been."""
        kind = "provisional" if self.provisional else "final"
        lines = [f"{kind} plan of {self.speculator} ({self.distribution}), method {self.method}"]
        width = max(len(verdict.rule) for verdict in self.verdicts)
        lines += (
            f"  {verdict.rule:{width}}  {_ANSWERS[verdict.passed]:10}  {verdict.reason}"
            for verdict in self.verdicts
        )
        if self.layout is None:
            lines.append("no draft-logits cache: drafts are verified as one-hot")
            return "\n".join(lines)
        if self.num_shards > 1:
            sharding = f"sharded over {self.num_shards} ranks"
        elif self.inputs.config.draft_logits_sharding == "off":
            sharding = "replicated, as draft_logits_sharding is off"
        else:
            sharding = "replicated"
        lines += (
            f"draft-logits cache {sharding}: {self.rows_per_rank} rows a rank for "
            f"{self.max_num_seqs} requests",
            f"layout {self.layout.value}, {self.dtype} {list(self.shape)}: "
            f"{_gib(self.bytes_per_rank)} a rank, {_gib(self.side_bytes_per_rank)} beside it",
            f"replicated it would be {_gib(self.replicated_bytes_per_rank)}: "
            f"{_gib(self.freed_bytes_per_rank)} a rank are freed",
        )
        for layout, size in self.possible_layouts.items():
            if layout is not self.layout:
                amount = _gib(size.logits_bytes)
                lines.append(f"also possible: layout {layout.value}, {amount} a rank")
        return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 100 else f"{num_bytes} bytes"
