"""What does drawing from k candidates cost? A launch: its bytes are kilobytes.

Checks each case against the torch twin, then times it in both layouts. The limit is 12 bytes read a
candidate and, of owned rows, 8 written in layout top_k and 24 in dense, over the bandwidth of a
copy; what it shows is that the op is bound by its launch.

    python benchmarks/cache_candidates.py [--json FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from drafts import HEADER, Case, cache_for, inputs
from timing import HEADER as TIMES
from timing import copy_bytes_per_us, measure, print_row, report

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels import cache_candidates
from specreg.kernels.cache_candidates import kernel
from specreg.kernels.cache_candidates.reference import cache_candidates_reference

DENSE, TOP_K = DraftLogitsLayout.DENSE, DraftLogitsLayout.TOP_K
CASES = [
    (Case(num_reqs, 7, 248_320, torch.float32, num_shards), layout, k)
    for num_reqs in (64, 1)
    for num_shards in (1, 4)
    for layout in (DENSE, TOP_K)
    for k in (4, 16, 64)
]


def time_case(case: Case, layout: DraftLogitsLayout, k: int, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device")
    bytes_per_us = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}, copy {bytes_per_us / 1e6:.2f} TB/s")
    print(f"{HEADER} layout  k {TIMES}")
    rows = []
    for case, layout, k in CASES:
        rows.append(time_case(case, layout, k, bytes_per_us))
        print_row(rows[-1], f"{case} {layout.value:6s} {k:2d}")
        torch.cuda.empty_cache()
    report(rows, options.json, bytes_per_us)


if __name__ == "__main__":
    main()
