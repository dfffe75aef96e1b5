"""What does verifying drafts cost, against the bytes that must move?

Checks each case against the torch twin, then times it with CUDA events: medians over repeated runs
whose data is far larger than the L2, launched one by one and replayed from a CUDA graph. The limit
is each target logit once, a target row and a draft row more for each rejection, over the bandwidth
of a device-to-device copy measured in the same run (bytes read and written).

    python benchmarks/rejection_sample.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache, DraftLogitsView
from specreg.kernels import rejection_sample
from specreg.kernels.draft_sample.op import draft_sample
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.reference import rejection_sample_reference
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.ownership import Shard

CASES = [  # requests that this rank owns, K, vocabulary, target dtype
    (64, 7, 248_320, torch.float32),
    (64, 7, 248_320, torch.bfloat16),
    (64, 5, 129_280, torch.float32),
    (64, 5, 129_280, torch.bfloat16),
    (16, 7, 248_320, torch.float32),
    (16, 7, 248_320, torch.bfloat16),
    (1, 7, 151_936, torch.bfloat16),
]
SHARD = Shard(4, 1)
DRAFT_DTYPE = torch.bfloat16


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


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a graph; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def make_batch(
    num_reqs: int, num_drafts: int, vocab_size: int, dtype: torch.dtype
) -> RejectionBatch:
    """Requests of one rank of four, with drafts of which about two are accepted."""
    torch.manual_seed(0)
    slots = torch.arange(num_reqs, device="cuda") * SHARD.num_shards + SHARD.shard_idx
    max_num_seqs = num_reqs * SHARD.num_shards
    temperature = torch.full((max_num_seqs,), 0.8, device="cuda")
    seeds = torch.arange(max_num_seqs, device="cuda")
    positions = torch.arange(num_reqs, device="cuda") + 100
    target = torch.empty(num_reqs, num_drafts + 1, vocab_size, dtype=dtype, device="cuda")
    target.normal_(0, 3)
    stored = torch.empty(num_reqs, num_drafts, vocab_size, dtype=DRAFT_DTYPE, device="cuda")
    cache = DraftLogitsCache(stored, SHARD, DraftLogitsLayout.DENSE, vocab_size).view()
    drafts = []
    for step in range(num_drafts):
        noise = torch.empty(num_reqs, vocab_size, device="cuda").normal_(0, 0.7)
        drafts.append(
            draft_sample(
                (target[:, step] + noise).to(DRAFT_DTYPE),
                slots,
                torch.full_like(slots, step),
                positions + step,
                temperature,
                seeds,
                cache,
                vocab_size=vocab_size,
            )
        )
    return RejectionBatch(
        target_logits=target.flatten(0, 1),
        draft_tokens=torch.stack(drafts, 1),
        idx_mapping=slots,
        cu_num_logits=torch.arange(num_reqs + 1, device="cuda") * (num_drafts + 1),
        positions=positions,
        temperature=temperature,
        seeds=seeds,
        cache=cache,
        vocab_size=vocab_size,
    )


def verify(batch: RejectionBatch) -> RejectionOutput:
    return rejection_sample(**vars(batch))


def check(batch: RejectionBatch) -> RejectionOutput:
    """Refuse to time a kernel that disagrees with its twin in more than draws at an edge."""
    output, twin = verify(batch), rejection_sample_reference(batch)
    assert torch.equal(output.num_sampled, twin.num_sampled), (
        "accepted drafts differ from the twin's"
    )
    num_differing = int((output.sampled != twin.sampled).sum())
    assert num_differing <= max(1, 0.03 * batch.num_reqs), "tokens differ from the twin's"
    return output


def bytes_moved(batch: RejectionBatch, output: RejectionOutput) -> int:
    """Each target logit once; target and draft row of each rejection once more."""
    cache: DraftLogitsView | None = batch.cache
    assert cache is not None
    num_rejections = int((output.num_sampled < batch.num_rows).sum())
    row = batch.vocab_size * (batch.target_logits.element_size() + cache.logits.element_size())
    return batch.target_logits.nbytes + num_rejections * row


def measure(case: tuple[int, int, int, torch.dtype], bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    num_reqs, num_drafts, vocab_size, dtype = case
    batch = make_batch(*case)
    output = check(batch)
    moved = bytes_moved(batch, output)
    eager = median_us(lambda: verify(batch))
    us = median_us(graph_of(lambda: verify(batch)).replay)
    limit = moved / bandwidth
    return {
        "num_reqs": num_reqs,
        "num_speculative_tokens": num_drafts,
        "vocab_size": vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "acceptance_length": round(float(output.num_sampled.float().mean()), 2),
        "eager_us": round(eager, 1),
        "us": round(us, 1),
        "moved_mb": round(moved / 1e6, 1),
        "limit_us": round(limit, 1),
        "ratio": round(us / limit, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    options = parser.parse_args()
    rows_reference.CHUNK_ELEMENTS = 2**26
    bandwidth = copy_bytes_per_us()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copy {bandwidth / 1e6:.2f} TB/s")
    print("requests  K  vocabulary  target    length    eager    graph       MB    limit  ratio")
    rows = []
    for case in CASES:
        row = measure(case, bandwidth)
        rows.append(row)
        print(
            f"{row['num_reqs']:8d} {row['num_speculative_tokens']:2d} {row['vocab_size']:11d}  "
            f"{row['dtype']:8s} {row['acceptance_length']:7.2f} {row['eager_us']:8.1f} "
            f"{row['us']:8.1f} {row['moved_mb']:8.1f} {row['limit_us']:8.1f} {row['ratio']:6.2f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"device": device, "copy_tb_per_s": bandwidth / 1e6, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
