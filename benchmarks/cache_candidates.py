"""What does drawing from k candidates cost? A launch: its bytes are kilobytes.

Checks each case against the torch twin, then times it in both layouts. The limit is 12 bytes read a
candidate and, of owned rows, 8 written in layout top_k and 24 in dense, over the bandwidth of a
copy; what it shows is that the op is bound by its launch.

    python benchmarks/cache_candidates.py [--json FILE]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from drafts import FP32, HEADER, SIZES, Case, cache_for, inputs
from timing import measure, run_script

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels import cache_candidates
from specreg.kernels.cache_candidates import kernel
from specreg.kernels.cache_candidates.reference import cache_candidates_reference

DENSE, TOP_K = DraftLogitsLayout.DENSE, DraftLogitsLayout.TOP_K


class Candidates(NamedTuple):
    """A proposal, and how its k candidates are kept."""

    case: Case
    layout: DraftLogitsLayout
    k: int

    def __str__(self) -> str:
        return f"{self.case} {self.layout.value:6s} {self.k:2d}"


CASES = [
    *(
        Candidates(Case(num_reqs, num_steps, vocab_size, FP32, num_shards), TOP_K, 16)
        for num_reqs in (256, 64, 8, 1)
        for num_steps, vocab_size in SIZES
        for num_shards in (1, 4)
    ),
    *(
        Candidates(Case(256, 7, 248_320, FP32, num_shards), layout, k)
        for layout, k in ((TOP_K, 4), (TOP_K, 64), (DENSE, 4), (DENSE, 16), (DENSE, 64))
        for num_shards in (1, 4)
    ),
]


def time_case(given: Candidates, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    case, layout, k = given
    scores, *maps = inputs(case, k)
    order = torch.rand(len(scores), 4096, device="cuda").argsort(1)[:, :k]
    ids = (order * 60).contiguous()
    cache, twin = cache_for(case, layout, k), cache_for(case, layout, k)
    tokens = cache_candidates(ids, scores, *maps, cache, vocab_size=case.vocab_size)
    expected = cache_candidates_reference(
        ids, scores, *maps, twin, vocab_size=case.vocab_size, num_nans=None
    )
    assert int((tokens != expected).sum()) <= 1, "tokens differ from the twin's"
    assert torch.equal(cache.logits, twin.logits), "stored scores differ from the twin's"
    timing = measure(
        lambda: cache_candidates(ids, scores, *maps, cache, vocab_size=case.vocab_size), kernel
    )
    written = 8 if layout is TOP_K else 24
    moved = ids.numel() * (12 + written / case.num_shards)
    columns = {"layout": layout.value, "num_candidates": k}
    return case.shape | columns | timing.row(moved, bytes_per_us)


if __name__ == "__main__":
    run_script(__doc__, f"{HEADER} layout  k ", CASES, time_case)
