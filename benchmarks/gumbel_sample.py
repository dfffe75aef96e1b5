"""What does one random word a logit cost, against two a token in `benchmarks/draft_sample.py`?

Checks each case against the torch twin, then times it as `draft_sample` is timed, against the same
limit.

    python benchmarks/gumbel_sample.py [--json FILE] [--sweep]
"""

from __future__ import annotations

from typing import Any

import torch
from drafts import CASES, HEADER, Case, cache_for, first_requests, inputs
from timing import measure, run_script, sweep

from specreg.draft_logits import DraftLogitsView
from specreg.kernels import gumbel_sample
from specreg.kernels.drafting import launch
from specreg.kernels.gumbel_sample import kernel, reference


def check(arguments: tuple[Any, ...], case: Case, cache: DraftLogitsView) -> None:
    """Refuse to time a kernel that disagrees with its twin, on the first eight requests."""
    few, rows = first_requests(arguments, case, 8)
    twin = cache_for(case)
    ids = gumbel_sample(*few, cache, vocab_size=case.vocab_size)
    twin_ids = reference.gumbel_sample_reference(
        *few,
        twin,
        vocab_size=case.vocab_size,
        target_ids=None,
        num_nans=None,
        noise_steps=few[2],
    )
    assert int((ids != twin_ids).sum()) <= 1, "tokens differ from the twin's"
    assert torch.equal(cache.logits[rows], twin.logits[rows]), "stored logits differ"


def time_case(case: Case, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    arguments, cache = inputs(case), cache_for(case)
    check(arguments, case, cache)
    timing = measure(
        lambda: gumbel_sample(*arguments, cache, vocab_size=case.vocab_size), launch, 20
    )
    return case.shape | timing.row(case.logits_bytes * (1 + 1 / case.num_shards), bytes_per_us)


def sweep_cases() -> None:
    """Microseconds of each launch for every size of its programs."""
    case = Case(256, 3, 248_320, num_shards=4)
    arguments, cache = inputs(case), cache_for(case)

    def run() -> None:
        gumbel_sample(*arguments, cache, vocab_size=case.vocab_size)

    print(f"{HEADER}\n{case}")
    blocks = {"BLOCKS_PER_PROGRAM": (2, 4, 8), "NUM_WARPS": (2, 4, 8)}
    sweep(run, launch, 0, kernel, blocks)
    sweep(run, launch, 1, kernel, {"TOKEN_WARPS": (2, 4, 8)})


if __name__ == "__main__":
    reference.CHUNK_ELEMENTS = 2**24
    run_script(__doc__, HEADER, CASES, time_case, sweep_cases)
