"""What does one random word a logit cost, against two a token in `benchmarks/draft_sample.py`?

Checks each case against the torch twin, then times it as `draft_sample` is timed, against the same
limit.

    python benchmarks/gumbel_sample.py [--json FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from drafts import HEADER, SIZES, Case, cache_for, inputs
from timing import HEADER as TIMES
from timing import copy_bytes_per_us, measure, print_row, report

from specreg.draft_logits import DraftLogitsView
from specreg.kernels import gumbel_sample
from specreg.kernels.gumbel_sample import kernel, reference

CASES = [
    Case(num_reqs, k, vocab_size, num_shards=num_shards)
    for num_reqs in (256, 1)
    for k, vocab_size in SIZES
    for num_shards in (1, 4)
]


def check(arguments: tuple[Any, ...], case: Case, cache: DraftLogitsView) -> None:
    """Refuse to time a kernel that disagrees with its twin, on the first eight requests."""
    num_tokens = min(case.num_reqs, 8) * case.num_speculative_tokens
    few = tuple(argument[:num_tokens] for argument in arguments[:4])
    twin_cache = cache_for(case)
    ids = gumbel_sample(*few, *arguments[4:], cache, vocab_size=case.vocab_size)
    twin_ids = reference.gumbel_sample_reference(
        *few,
        *arguments[4:],
        twin_cache,
        vocab_size=case.vocab_size,
        target_ids=None,
        num_nans=None,
        noise_steps=few[2],
    )
    assert int((ids != twin_ids).sum()) <= 1, "tokens differ from the twin's"
    rows = slice(0, -(-min(case.num_reqs, 8) // case.num_shards))
    assert torch.equal(cache.logits[rows], twin_cache.logits[rows]), "stored logits differ"


def time_case(case: Case, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    arguments, cache = inputs(case), cache_for(case)
    check(arguments, case, cache)
    timing = measure(lambda: gumbel_sample(*arguments, cache, vocab_size=case.vocab_size), kernel)
    return case.shape | timing.row(case.logits_bytes * (1 + 1 / case.num_shards), bytes_per_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device")
    reference.CHUNK_ELEMENTS = 2**24
    bytes_per_us = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}, copy {bytes_per_us / 1e6:.2f} TB/s")
    print(HEADER + TIMES)
    rows = []
    for case in CASES:
        rows.append(time_case(case, bytes_per_us))
        print_row(rows[-1], str(case))
        torch.cuda.empty_cache()
    report(rows, options.json, bytes_per_us)


if __name__ == "__main__":
    main()
