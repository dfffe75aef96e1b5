"""What does drawing draft tokens cost, against the bytes that must move?

Checks each case against the torch twin, then times it: replayed from a CUDA graph, launched one by
one, and each launch alone. The data of cases of 8 requests and fewer fits into the L2. The limit is
`T V s (1 + 1/num_shards)` bytes over the bandwidth of a device-to-device copy measured in the same
run (bytes read and written).

    python benchmarks/draft_sample.py [--json FILE] [--sweep]
"""

from __future__ import annotations

from typing import Any

import torch
from drafts import CASES, FP32, HEADER, Case, cache_for, first_requests, inputs
from timing import measure, run_script, sweep

from specreg.draft_logits import DraftLogitsView
from specreg.kernels import draft_sample
from specreg.kernels.draft_sample import kernel, reference
from specreg.kernels.drafting import launch


def check(arguments: tuple[Any, ...], case: Case, cache: DraftLogitsView) -> None:
    """Refuse to time a kernel that disagrees with its twin, on the first 32 requests."""
    few, rows = first_requests(arguments, case, 32)
    twin = cache_for(case)
    ids = draft_sample(*few, cache, vocab_size=case.vocab_size)
    twin_ids = reference.draft_sample_reference(
        *few, twin, vocab_size=case.vocab_size, target_ids=None, num_nans=None
    )
    num_differing = int((ids != twin_ids).sum())
    assert num_differing <= max(1, 0.005 * len(ids)), "tokens differ from the twin's"
    assert torch.equal(cache.logits[rows], twin.logits[rows]), "stored logits differ"
    logsumexps = cache.logsumexp[rows], twin.logsumexp[rows]
    assert torch.allclose(*logsumexps, rtol=2e-6, atol=2e-6), "statistics differ"


def time_case(case: Case, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    arguments, cache = inputs(case), cache_for(case)
    check(arguments, case, cache)
    timing = measure(lambda: draft_sample(*arguments, cache, vocab_size=case.vocab_size), launch)
    return case.shape | timing.row(case.logits_bytes * (1 + 1 / case.num_shards), bytes_per_us)


def sweep_cases() -> None:
    """Microseconds of each launch of two cases for every size of its programs."""
    for case in (Case(256, 7, 248_320, num_shards=4), Case(8, 7, 248_320)):
        arguments, cache = inputs(case), cache_for(case)
        print(f"{HEADER}\n{case}")

        def run() -> None:
            draft_sample(*arguments, cache, vocab_size=case.vocab_size)  # noqa: B023 - run at once

        blocks = {"BLOCKS_PER_PROGRAM": (4, 8, 16), "NUM_WARPS": (2, 4, 8)}
        sweep(run, launch, 0, kernel, blocks)
        sweep(run, launch, 1, kernel, {"TOKEN_WARPS": (2, 4, 8)})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    reference.CHUNK_ELEMENTS = 2**27
    cases = [*CASES, *(Case(256, 7, 248_320, FP32, num_shards) for num_shards in (1, 4))]
    run_script(__doc__, HEADER, cases, time_case, sweep_cases)
