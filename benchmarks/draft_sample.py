"""What does drawing draft tokens cost, against the bytes that must move?

Checks each case against the torch twin, then times it: replayed from a CUDA graph, launched one by
one, and each launch alone. The data of cases of 8 requests and fewer fits into the L2. The limit is
`T V s (1 + 1/num_shards)` bytes over the bandwidth of a device-to-device copy measured in the same
run (bytes read and written).

    python benchmarks/draft_sample.py [--json FILE] [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from drafts import CASES, HEADER, Case, cache_for, inputs
from timing import HEADER as TIMES
from timing import copy_bytes_per_us, launch_us, measure, print_row, recorded, report

from specreg.draft_logits import DraftLogitsView
from specreg.kernels import draft_sample
from specreg.kernels.draft_sample import kernel, reference


def check(arguments: tuple[Any, ...], case: Case, cache: DraftLogitsView) -> None:
    """Refuse to time a kernel that disagrees with its twin."""
    twin_cache = cache_for(case)
    ids = draft_sample(*arguments, cache, vocab_size=case.vocab_size)
    twin_ids = reference.draft_sample_reference(
        *arguments, twin_cache, vocab_size=case.vocab_size, target_ids=None, num_nans=None
    )
    num_differing = int((ids != twin_ids).sum())
    assert num_differing <= max(1, 0.005 * len(ids)), "tokens differ from the twin's"
    assert torch.equal(cache.logits, twin_cache.logits), "stored logits differ from the twin's"
    assert torch.allclose(cache.logsumexp, twin_cache.logsumexp, rtol=2e-6, atol=2e-6)


def time_case(case: Case, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    arguments, cache = inputs(case), cache_for(case)
    check(arguments, case, cache)
    timing = measure(lambda: draft_sample(*arguments, cache, vocab_size=case.vocab_size), kernel)
    return case.shape | timing.row(case.logits_bytes * (1 + 1 / case.num_shards), bytes_per_us)


def sweep() -> None:
    """Microseconds of each launch of three cases for every size of its programs."""
    for case in (Case(256, 7, 248_320, num_shards=4), Case(256, 7, 248_320), Case(8, 7, 248_320)):
        arguments, cache = inputs(case), cache_for(case)
        print(f"{HEADER}\n{case}")
        for launch, names, sizes in (
            (0, ("BLOCKS_PER_PROGRAM", "NUM_WARPS"), [(2, 4, 8, 16, 32), (1, 2, 4, 8)]),
            (1, ("TOKEN_WARPS",), [(1, 2, 4, 8, 16)]),
        ):
            before, times = {name: getattr(kernel, name) for name in names}, {}
            for values in itertools.product(*sizes):
                vars(kernel).update(zip(names, values, strict=True))
                with recorded(kernel) as calls:
                    draft_sample(*arguments, cache, vocab_size=case.vocab_size)
                times[values] = launch_us(calls[launch][1])
            vars(kernel).update(before)
            print(f"  us of {calls[launch][0]} by {' x '.join(names)}")
            for values, us in sorted(times.items(), key=lambda item: item[1]):
                used = " (used)" if values == tuple(before.values()) else ""
                print(f"    {' x '.join(map(str, values)):8s} {us:8.1f}{used}", flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    parser.add_argument("--sweep", action="store_true", help="time program sizes instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device")
    if options.sweep:
        return sweep()
    reference.CHUNK_ELEMENTS = 2**27
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
