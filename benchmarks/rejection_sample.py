"""What does verifying drafts cost, against the bytes that must move?

Checks each case against the torch twin, then times it with CUDA events: medians over repeated runs,
launched one by one and replayed from a CUDA graph. The data of cases of 8 and 1 requests and of the
smallest vocabulary fits into the L2; the others are far larger. The limit is each target logit once
and what the method reads beside it, over the bandwidth of a device-to-device copy measured in the
same run (bytes read and written): a target row and a draft row a rejection, in method `block` of
every draft, and draft rows only where cells hold more than candidates.

    python benchmarks/rejection_sample.py [--json FILE]

`benchmarks/rejection_sample_parts.py` says where the time goes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from timing import copy_bytes_per_us, graph_of, host_us, median_us

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache, DraftLogitsView
from specreg.draft_vocab import target_to_draft_table
from specreg.kernels import rejection_sample
from specreg.kernels.draft_sample.op import draft_sample
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.block.reference import block_sample_reference
from specreg.kernels.rejection_sample.reference import rejection_sample_reference
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.kernels.rejection_sample.synthetic.reference import synthetic_sample_reference
from specreg.ownership import Shard

FP32, BF16 = torch.float32, torch.bfloat16
DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout


@dataclass(frozen=True)
class Case:
    """Requests that a rank owns, their round, and how they are verified."""

    num_reqs: int
    num_drafts: int
    vocab_size: int
    dtype: torch.dtype
    method: str = "standard"
    layout: DraftLogitsLayout = DENSE


CASES = [
    Case(64, 7, 248_320, FP32),
    Case(64, 7, 248_320, BF16),
    Case(64, 5, 129_280, FP32),
    Case(64, 5, 129_280, BF16),
    Case(16, 7, 248_320, FP32),
    Case(16, 7, 248_320, BF16),
    Case(8, 7, 248_320, BF16),
    Case(1, 7, 151_936, BF16),
    Case(64, 3, 49_152, BF16),
    Case(64, 7, 248_320, BF16, "standard", DRAFT_VOCAB),
    Case(64, 7, 248_320, BF16, "standard", TOP_K),
    Case(64, 7, 248_320, FP32, "block"),
    Case(64, 7, 248_320, BF16, "block"),
    Case(64, 7, 248_320, BF16, "block", DRAFT_VOCAB),
    Case(64, 7, 248_320, BF16, "block", TOP_K),
    Case(1, 7, 151_936, BF16, "block"),
    Case(64, 7, 248_320, BF16, "synthetic"),
]
SHARD = Shard(4, 1)
DRAFT_DTYPE = BF16
DRAFT_VOCAB_SIZE = 32_000
NUM_CANDIDATES = 16
TWINS = {
    "standard": rejection_sample_reference,
    "block": block_sample_reference,
    "synthetic": synthetic_sample_reference,
}


def make_batch(case: Case) -> RejectionBatch:
    """Requests of one rank of four, with drafts of which about two are accepted."""
    torch.manual_seed(0)
    num_reqs, num_drafts, vocab_size = case.num_reqs, case.num_drafts, case.vocab_size
    slots = torch.arange(num_reqs, device="cuda") * SHARD.num_shards + SHARD.shard_idx
    max_num_seqs = num_reqs * SHARD.num_shards
    temperature = torch.full((max_num_seqs,), 0.8, device="cuda")
    seeds = torch.arange(max_num_seqs, device="cuda")
    positions = torch.arange(num_reqs, device="cuda") + 100
    target = torch.empty(num_reqs, num_drafts + 1, vocab_size, dtype=case.dtype, device="cuda")
    target.normal_(0, 3)
    columns = torch.randperm(vocab_size, device="cuda")[:DRAFT_VOCAB_SIZE]
    if case.layout is DRAFT_VOCAB:
        target[..., columns] += 4
    stored = torch.empty(num_reqs, num_drafts, vocab_size, dtype=DRAFT_DTYPE, device="cuda")
    view = DraftLogitsCache(stored, SHARD, DENSE, vocab_size).view()
    ids = torch.empty(num_reqs, num_drafts, NUM_CANDIDATES, dtype=torch.int64, device="cuda")
    drafts = []
    for step in range(num_drafts):
        noise = torch.empty(num_reqs, vocab_size, device="cuda").normal_(0, 0.7)
        logits = (target[:, step] + noise).to(DRAFT_DTYPE)
        if case.layout is TOP_K:
            ids[:, step] = logits.topk(NUM_CANDIDATES, 1).indices
            logits = only_columns(logits, ids[:, step])
        elif case.layout is DRAFT_VOCAB:
            logits = only_columns(logits, columns.expand(num_reqs, -1))
        steps = torch.full_like(slots, step)
        drafts.append(
            draft_sample(
                logits,
                slots,
                steps,
                positions + step,
                temperature,
                seeds,
                view,
                vocab_size=vocab_size,
            )
        )
    rates = torch.linspace(0.8, 0.2, num_drafts, device="cuda")
    return RejectionBatch(
        target_logits=target.flatten(0, 1),
        draft_tokens=torch.stack(drafts, 1),
        idx_mapping=slots,
        cu_num_logits=torch.arange(num_reqs + 1, device="cuda") * (num_drafts + 1),
        positions=positions,
        temperature=temperature,
        seeds=seeds,
        cache=in_layout(view, case.layout, columns, ids),
        vocab_size=vocab_size,
        acceptance_rates=rates if case.method == "synthetic" else None,
    )


def only_columns(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`logits [n, vocab_size]` at `columns [n, m]`, -inf elsewhere."""
    kept = torch.full_like(logits, -torch.inf)
    return kept.scatter_(1, columns, logits.gather(1, columns))


def in_layout(
    view: DraftLogitsView, layout: DraftLogitsLayout, columns: torch.Tensor, ids: torch.Tensor
) -> DraftLogitsView:
    """The same distributions as in the dense `view`."""
    if layout is DRAFT_VOCAB:
        table = target_to_draft_table(columns, view.vocab_size)
        logits = view.logits[..., columns].contiguous()
        return replace(view, layout=layout, logits=logits, target_to_draft=table)
    if layout is TOP_K:
        logits = view.logits.gather(2, ids).float()
        return replace(view, layout=layout, logits=logits, ids=ids.int())
    return view


def verify(batch: RejectionBatch, method: str) -> RejectionOutput:
    return rejection_sample(**vars(batch), method=method)


def check(batch: RejectionBatch, method: str) -> RejectionOutput:
    """Refuse to time a kernel that disagrees with its twin in more than draws at an edge."""
    output, twin = verify(batch, method), TWINS[method](batch)
    assert torch.equal(output.num_sampled, twin.num_sampled), (
        "accepted drafts differ from the twin's"
    )
    num_differing = int((output.sampled != twin.sampled).sum())
    assert num_differing <= max(1, 0.03 * batch.num_reqs), "tokens differ from the twin's"
    return output


def bytes_moved(case: Case, batch: RejectionBatch, output: RejectionOutput) -> int:
    """Each target logit once, and once more the rows that the method reads again."""
    cache: DraftLogitsView | None = batch.cache
    assert cache is not None
    target_row = batch.vocab_size * batch.target_logits.element_size()
    draft_row = 0 if case.layout is TOP_K else cache.logits[0, 0].nbytes
    num_rows = int((output.num_sampled < batch.num_rows).sum())
    if case.method == "synthetic":
        num_rows = 0
    elif case.method == "block" and case.layout is not TOP_K:
        num_rows = batch.num_reqs * (batch.num_rows - 1)
    return batch.target_logits.nbytes + num_rows * (target_row + draft_row)


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    batch = make_batch(case)
    output = check(batch, case.method)
    moved = bytes_moved(case, batch, output)
    eager = median_us(lambda: verify(batch, case.method))
    host = host_us(lambda: verify(batch, case.method))
    us = median_us(graph_of(lambda: verify(batch, case.method)).replay)
    limit = moved / bandwidth
    return {
        "method": case.method,
        "layout": case.layout.value,
        "num_reqs": case.num_reqs,
        "num_speculative_tokens": case.num_drafts,
        "vocab_size": case.vocab_size,
        "dtype": str(case.dtype).removeprefix("torch."),
        "acceptance_length": round(float(output.num_sampled.float().mean()), 2),
        "host_us": round(host, 1),
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
    print(
        "method    layout      requests  K  vocabulary  target    length     host    eager    graph"
        "       MB    limit  ratio"
    )
    rows = []
    for case in CASES:
        row = measure(case, bandwidth)
        rows.append(row)
        print(
            f"{row['method']:9s} {row['layout']:11s} {row['num_reqs']:8d} "
            f"{row['num_speculative_tokens']:2d} {row['vocab_size']:11d}  {row['dtype']:8s} "
            f"{row['acceptance_length']:7.2f} {row['host_us']:8.1f} {row['eager_us']:8.1f} "
            f"{row['us']:8.1f} {row['moved_mb']:8.1f} {row['limit_us']:8.1f} {row['ratio']:6.2f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"device": device, "copy_tb_per_s": bandwidth / 1e6, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
