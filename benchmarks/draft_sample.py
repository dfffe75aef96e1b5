"""What does drawing draft tokens cost, against the bytes that must move?

Checks each case against the torch twin, then times it with CUDA events: medians over repeated
launches whose data is far larger than the L2 (but for the last case). The limit is
`T V s (1 + 1/num_shards)` bytes over the bandwidth of a device-to-device copy measured in the same
run (bytes read and written).

    python benchmarks/draft_sample.py [--json FILE] [--sweep]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache, DraftLogitsView
from specreg.kernels import draft_sample
from specreg.kernels.draft_sample import reference
from specreg.ownership import Shard, rows_per_rank

CASES = [  # requests, K, vocabulary, dtype
    (256, 7, 248_320, torch.bfloat16),
    (256, 5, 129_280, torch.bfloat16),
    (256, 3, 248_320, torch.bfloat16),
    (64, 7, 248_320, torch.bfloat16),
    (64, 7, 248_320, torch.float32),
    (1, 7, 151_936, torch.bfloat16),
]
NUM_SHARDS = (1, 4)


def median_us(run: Callable[[], object], repeats: int = 50) -> float:
    """Median microseconds of `run` on the current stream, after ten warm-up runs."""
    for _ in range(10):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for start, end in zip(marks[::2], marks[1::2], strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = (start.elapsed_time(end) for start, end in zip(marks[::2], marks[1::2], strict=True))
    return 1000.0 * statistics.median(times)


def copy_bytes_per_us() -> float:
    """Bytes read and written a microsecond by a device-to-device copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source), 20)


def inputs(num_reqs: int, num_steps: int, vocab_size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Positional arguments of `draft_sample`, without the cache."""
    slots = torch.arange(num_reqs, device="cuda").repeat_interleave(num_steps)
    steps = torch.arange(num_steps, device="cuda").repeat(num_reqs)
    logits = torch.empty(num_reqs * num_steps, vocab_size, dtype=dtype, device="cuda").normal_(0, 3)
    temperature = torch.full((num_reqs,), 0.8, device="cuda")
    return logits, slots, steps, steps + 100, temperature, torch.arange(num_reqs, device="cuda")


def allocate(
    num_reqs: int, num_steps: int, vocab_size: int, dtype: torch.dtype, shard: Shard
) -> DraftLogitsView:
    """A rank's cache."""
    rows = rows_per_rank(num_reqs, shard.num_shards)
    logits = torch.empty(rows, num_steps, vocab_size, dtype=dtype, device="cuda")
    return DraftLogitsCache(logits, shard, DraftLogitsLayout.DENSE, vocab_size).view()


def check(arguments: tuple[Any, ...], cache: DraftLogitsView) -> None:
    """Refuse to time a kernel that disagrees with its twin."""
    twin_cache = DraftLogitsCache(
        torch.empty_like(cache.logits), cache.shard, cache.layout, cache.vocab_size
    ).view()
    ids = draft_sample(*arguments, cache, vocab_size=cache.vocab_size)
    twin_ids = reference.draft_sample_reference(
        *arguments, twin_cache, vocab_size=cache.vocab_size, target_ids=None, num_nans=None
    )
    assert float((ids != twin_ids).float().mean()) < 0.005, "tokens differ from the twin's"
    assert torch.equal(cache.logits, twin_cache.logits), "stored logits differ from the twin's"
    assert torch.allclose(cache.logsumexp, twin_cache.logsumexp, rtol=2e-6, atol=2e-6)


def measure(case: tuple[int, int, int, torch.dtype], num_shards: int, bandwidth: float) -> dict:
    """One row of the table."""
    num_reqs, num_steps, vocab_size, dtype = case
    arguments = inputs(*case)
    cache = allocate(*case, Shard(num_shards, 0))
    check(arguments, cache)
    moved = arguments[0].nbytes * (1 + 1 / num_shards)
    us = median_us(lambda: draft_sample(*arguments, cache, vocab_size=vocab_size))
    limit = moved / bandwidth
    return {
        "num_reqs": num_reqs,
        "num_speculative_tokens": num_steps,
        "vocab_size": vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "num_shards": num_shards,
        "us": round(us, 1),
        "moved_mb": round(moved / 1e6, 1),
        "limit_us": round(limit, 1),
        "ratio": round(us / limit, 2),
    }


def sweep() -> None:
    """Microseconds of the first case for each size of the first launch's programs."""
    from specreg.kernels.draft_sample import kernel

    arguments = inputs(*CASES[0])
    print("blocks a program  warps  1 shard  TP4 shard")
    for kernel.BLOCKS_PER_PROGRAM in (2, 4, 8, 16):
        for kernel.NUM_WARPS in (1, 2, 4, 8):
            times = []
            for num_shards in NUM_SHARDS:
                cache = allocate(*CASES[0], Shard(num_shards, 0))
                draw = functools.partial(draft_sample, *arguments, cache, vocab_size=CASES[0][2])
                times.append(median_us(draw, 20))
            size = f"{kernel.BLOCKS_PER_PROGRAM:16d} {kernel.NUM_WARPS:6d}"
            print(f"{size} {times[0]:8.1f} {times[1]:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    parser.add_argument("--sweep", action="store_true", help="time program sizes instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device")
    reference.CHUNK_ELEMENTS = 2**27
    if options.sweep:
        return sweep()
    bandwidth = copy_bytes_per_us()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copy {bandwidth / 1e6:.2f} TB/s")
    print("requests  K  vocabulary  dtype     shards       us       MB    limit  ratio")
    rows = []
    for case in CASES:
        for num_shards in NUM_SHARDS:
            row = measure(case, num_shards, bandwidth)
            rows.append(row)
            print(
                f"{row['num_reqs']:8d} {row['num_speculative_tokens']:2d} {row['vocab_size']:11d}  "
                f"{row['dtype']:8s} {num_shards:7d} {row['us']:8.1f} {row['moved_mb']:8.1f} "
                f"{row['limit_us']:8.1f} {row['ratio']:6.2f}"
            )
    if options.json:
        result = {"device": device, "copy_tb_per_s": bandwidth / 1e6, "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
