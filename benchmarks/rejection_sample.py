"""What does verifying drafts cost, against the bytes that must move?

Checks each case against the torch twin, then times it: replayed from a CUDA graph, launched one by
one, and each launch alone. A rank verifies the requests that it owns: all of them with one shard,
every fourth with four. The data of 8 requests and fewer fits into the L2. The limit is each target
logit once and what the method reads beside it, over the bandwidth of a device-to-device copy
measured in the same run (bytes read and written): a target row and a draft row a rejection, in
method `block` of every draft, and draft rows only where cells hold more than candidates.

    python benchmarks/rejection_sample.py [--json FILE] [--sweep]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from drafts import HEADER, SIZES
from timing import measure, run_script, sweep

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache, DraftLogitsView
from specreg.draft_vocab import target_to_draft_table
from specreg.kernels import rejection_sample
from specreg.kernels.draft_sample.op import draft_sample
from specreg.kernels.rejection_sample import prepare
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.block.reference import block_sample_reference
from specreg.kernels.rejection_sample.reference import rejection_sample_reference
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.kernels.rejection_sample.synthetic.reference import synthetic_sample_reference
from specreg.ownership import Shard, rows_per_rank

FP32, BF16 = torch.float32, torch.bfloat16
DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout


class Case(NamedTuple):
    """Requests of all ranks, their round, and how they are verified."""

    num_reqs: int
    num_speculative_tokens: int
    vocab_size: int
    dtype: torch.dtype = BF16
    num_shards: int = 1
    method: str = "standard"
    layout: DraftLogitsLayout = DENSE

    @property
    def shape(self) -> dict[str, Any]:
        """The case as columns of a table."""
        dtype = str(self.dtype).removeprefix("torch.")
        return self._asdict() | {"dtype": dtype, "layout": self.layout.value}

    def __str__(self) -> str:
        return (
            f"{self.num_reqs:8d} {self.num_speculative_tokens:2d} {self.vocab_size:11d}  "
            f"{self.shape['dtype']:8s} {self.num_shards:6d} {self.method:9s} "
            f"{self.layout.value:11s}"
        )


LARGE = 248_320
CASES = [
    *(
        Case(num_reqs, k, vocab_size, BF16, num_shards)
        for num_reqs in (256, 64, 8, 1)
        for k, vocab_size in SIZES
        for num_shards in (1, 4)
    ),
    *(
        Case(256, k, vocab_size, FP32, num_shards)
        for k, vocab_size in ((7, LARGE), (5, 129_280), (3, LARGE))
        for num_shards in (1, 4)
    ),
    *(Case(256, 7, LARGE, BF16, 4, "standard", layout) for layout in (DRAFT_VOCAB, TOP_K)),
    *(Case(256, 7, LARGE, BF16, 4, "block", layout) for layout in (DENSE, DRAFT_VOCAB, TOP_K)),
    Case(256, 7, LARGE, FP32, 4, "block"),
    Case(1, 7, LARGE, BF16, 1, "block"),
    Case(256, 7, LARGE, BF16, 4, "synthetic"),
]
DRAFT_DTYPE = BF16
DRAFT_VOCAB_SIZE = 32_000
NUM_CANDIDATES = 16
TWINS = {
    "standard": rejection_sample_reference,
    "block": block_sample_reference,
    "synthetic": synthetic_sample_reference,
}


def make_batch(case: Case) -> RejectionBatch:
    """Requests of the first rank, with drafts of which about two are accepted."""
    torch.manual_seed(0)
    shard, vocab_size = Shard(case.num_shards, 0), case.vocab_size
    num_reqs, num_drafts = (
        rows_per_rank(case.num_reqs, case.num_shards),
        case.num_speculative_tokens,
    )
    slots = torch.arange(num_reqs, device="cuda") * shard.num_shards
    temperature = torch.full((case.num_reqs,), 0.8, device="cuda")
    seeds = torch.arange(case.num_reqs, device="cuda")
    positions = torch.arange(num_reqs, device="cuda") + 100
    target = torch.empty(num_reqs, num_drafts + 1, vocab_size, dtype=case.dtype, device="cuda")
    target.normal_(0, 3)
    columns = torch.randperm(vocab_size, device="cuda")[:DRAFT_VOCAB_SIZE]
    if case.layout is DRAFT_VOCAB:
        target[..., columns] += 4
    stored = torch.empty(num_reqs, num_drafts, vocab_size, dtype=DRAFT_DTYPE, device="cuda")
    view = DraftLogitsCache(stored, shard, DENSE, vocab_size).view()
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
    """Refuse to time a kernel that disagrees with its twin, on the first 16 requests, in more than
    draws at an edge."""
    output, few = verify(batch, method), min(batch.num_reqs, 16)
    twin = TWINS[method](batch.requests(0, few))
    assert torch.equal(output.num_sampled[:few], twin.num_sampled), (
        "accepted drafts differ from the twin's"
    )
    num_differing = int((output.sampled[:few] != twin.sampled).sum())
    assert num_differing <= max(1, 0.03 * few), "tokens differ from the twin's"
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


def time_case(case: Case, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    batch = make_batch(case)
    output = check(batch, case.method)
    timing = measure(lambda: verify(batch, case.method), prepare)
    length = {"acceptance_length": round(float(output.num_sampled.float().mean()), 2)}
    return case.shape | length | timing.row(bytes_moved(case, batch, output), bytes_per_us)


def sweep_cases() -> None:
    """Microseconds of each launch for every size of its programs."""
    target = {"BLOCKS_PER_PROGRAM": (4, 8, 16), "NUM_WARPS": (1, 2, 4)}
    residual = {"RESIDUAL_BLOCKS_PER_PROGRAM": (2, 4, 8), "RESIDUAL_NUM_WARPS": (2, 4)}
    for case, launches in (
        (Case(256, 7, LARGE, BF16, 4), (target, {"JUDGE_NUM_WARPS": (1, 2, 4, 8)}, residual)),
        (Case(256, 7, LARGE, BF16, 4), (None, None, None, {"DRAW_NUM_WARPS": (1, 2, 4, 8)})),
        (Case(256, 7, LARGE, FP32, 4), (target, None, residual)),
        (Case(256, 7, LARGE, BF16, 4, layout=DRAFT_VOCAB), (None, None, residual)),
        (Case(256, 7, LARGE, BF16, 4, "block"), (None, None, residual)),
        (Case(1, 7, LARGE), (target, {"JUDGE_NUM_WARPS": (1, 2, 4, 8)}, residual)),
    ):
        batch = make_batch(case)
        print(case)
        for index, sizes in enumerate(launches):
            if sizes is not None:
                sweep(lambda: verify(batch, case.method), prepare, index, prepare, sizes)  # noqa: B023
        torch.cuda.empty_cache()


if __name__ == "__main__":
    rows_reference.CHUNK_ELEMENTS = 2**26
    header = f"{HEADER} method    layout     "
    run_script(__doc__, header, CASES, time_case, sweep_cases)
