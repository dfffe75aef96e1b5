"""Cases and inputs of the benchmarks of ops that draw drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache, DraftLogitsView
from specreg.ownership import Shard, rows_per_rank

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A proposal of all requests at once, and among how many ranks its cache is shared."""

    num_reqs: int
    num_speculative_tokens: int
    vocab_size: int
    dtype: torch.dtype = BF16
    num_shards: int = 1

    @property
    def shape(self) -> dict[str, Any]:
        """The case as columns of a table."""
        return self._asdict() | {"dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def logits_bytes(self) -> int:
        """Bytes of the draft logits."""
        num_tokens = self.num_reqs * self.num_speculative_tokens
        return num_tokens * self.vocab_size * self.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{self.num_reqs:8d} {self.num_speculative_tokens:2d} {self.vocab_size:11d}  "
            f"{self.shape['dtype']:8s} {self.num_shards:6d}"
        )


HEADER = "requests  K  vocabulary  dtype    shards"
SIZES = [(k, vocab_size) for k in (7, 5, 3) for vocab_size in (248_320, 129_280, 49_152)]
CASES = [
    Case(num_reqs, k, vocab_size, BF16, num_shards)
    for num_reqs in (256, 64, 8, 1)
    for k, vocab_size in SIZES
    for num_shards in (1, 4)
]


def inputs(case: Case, width: int | None = None) -> tuple[Any, ...]:
    """Positional arguments of the ops, without the cache."""
    num_reqs, num_steps = case.num_reqs, case.num_speculative_tokens
    width = case.vocab_size if width is None else width
    slots = torch.arange(num_reqs, device="cuda").repeat_interleave(num_steps)
    steps = torch.arange(num_steps, device="cuda").repeat(num_reqs)
    logits = torch.empty(num_reqs * num_steps, width, dtype=case.dtype, device="cuda").normal_(0, 3)
    temperature = torch.full((num_reqs,), 0.8, device="cuda")
    return logits, slots, steps, steps + 100, temperature, torch.arange(num_reqs, device="cuda")


def first_requests(
    arguments: tuple[Any, ...], case: Case, most: int
) -> tuple[tuple[Any, ...], slice]:
    """`inputs` of the first requests alone, and their rows in `cache_for`."""
    num_reqs = min(case.num_reqs, most)
    num_tokens = num_reqs * case.num_speculative_tokens
    few = (*(argument[:num_tokens] for argument in arguments[:4]), *arguments[4:])
    return few, slice(0, rows_per_rank(num_reqs, case.num_shards))


def cache_for(
    case: Case,
    layout: DraftLogitsLayout = DraftLogitsLayout.DENSE,
    num_candidates: int | None = None,
) -> DraftLogitsView:
    """The first rank's cache."""
    shard = Shard(case.num_shards, 0)
    rows = rows_per_rank(case.num_reqs, case.num_shards)
    width, dtype = case.vocab_size, case.dtype
    if num_candidates is not None:
        dtype = FP32
        width = num_candidates if layout is DraftLogitsLayout.TOP_K else width
    logits = torch.empty(rows, case.num_speculative_tokens, width, dtype=dtype, device="cuda")
    return DraftLogitsCache(
        logits, shard, layout, case.vocab_size, num_candidates=num_candidates
    ).view()
