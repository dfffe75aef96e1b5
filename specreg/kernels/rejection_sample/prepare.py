"""What the Triton launches of `rejection_sample` are given: arguments in groups, scratch, parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specreg.kernels.common.args import NO_CACHE, CacheArgs, cache_args
from specreg.kernels.common.launch import launch, specialisation
from specreg.kernels.draft_sample.reference import BLOCK_SIZE
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.ownership import cdiv

__all__ = ["BatchArgs", "Part", "RowArgs", "TargetArgs", "in_parts", "next_power_of_2", "prepare"]

# Requests whose scratch exists at a time: 2.1 MB for 7 drafts over 248,320 columns.
REQUESTS_AT_ONCE = 64

# `python benchmarks/rejection_sample.py --sweep`, one H200, 64 owned requests, K 7, 248,320
# columns, us: the target's blocks 62 in bf16 and 117 in fp32, within 4 % for most other sizes;
# residuals in bf16 22 with 4 x 2 and 8 x 4, of a reduced vocabulary 31 and 33, in method block 142
# and 144; judging 3.2 with one warp and 3.6 with four; drawing 6.1 with four and 5.9 with eight.
BLOCKS_PER_PROGRAM = 8
NUM_WARPS = 2
RESIDUAL_BLOCKS_PER_PROGRAM = 4
RESIDUAL_NUM_WARPS = 2
JUDGE_NUM_WARPS = 1
DRAW_NUM_WARPS = 4

NUM_FLOATS = 3  # of a row's record, before its blocks
NUM_INTS = 2


class TargetArgs(NamedTuple):
    """Target logits: first element, row stride, columns that count."""

    logits: Tensor
    stride: int
    vocab_size: int


class BatchArgs(NamedTuple):
    """Per request, then per slot."""

    draft_tokens: Tensor
    draft_stride: int
    idx_mapping: Tensor
    cu_num_logits: Tensor
    positions: Tensor
    temperature: Tensor
    seeds: Tensor


class RowArgs(NamedTuple):
    """A record for each row of each request: what is known of it, then a value a block.

    `floats [num_reqs, num_rows, 3 + num_blocks]`: largest logit, log2 of the softmax denominator
    over it, log2(p/q) of the draft, then block peaks. `ints [num_reqs, num_rows, 2 + num_blocks]`:
    verdict, argmax, then block masses.
    """

    floats: Tensor
    ints: Tensor
    num_blocks: int


class Part(NamedTuple):
    """Requests that are verified together, as their launches take them.

    Attributes:
        output: written in place.
        sums: fp32 scratch for the blocks of residuals, `num_blocks` for each.
        rows: scratch.
        target, batch, cache: inputs; `NO_CACHE` takes drafts for argmaxes.
        num_reqs, num_rows: requests, and rows that each has at most.
        num_shards: of the cache.
        num_candidates: a power of two at or above the candidates of a cell.
        key: what the launches are specialised for.
    """

    output: RejectionOutput
    sums: Tensor
    rows: RowArgs
    target: TargetArgs
    batch: BatchArgs
    cache: CacheArgs
    num_reqs: int
    num_rows: int
    num_shards: int
    num_candidates: int
    key: Hashable

    @property
    def all_blocks(self) -> int:
        """A power of two at or above the blocks of a row."""
        return next_power_of_2(self.rows.num_blocks)

    @property
    def has_cache(self) -> bool:
        """Whether drafts have a distribution."""
        return self.cache is not NO_CACHE

    def launch_blocks(self, kernel: Any) -> None:
        """Launch programs (blocks, row, request)."""
        some = min(BLOCKS_PER_PROGRAM, self.all_blocks)
        grid = (cdiv(self.rows.num_blocks, some), self.num_rows, self.num_reqs)
        self.launch(kernel, grid, some, NUM_WARPS)

    def launch_rows(self, kernel: Any, **others: Tensor) -> None:
        """Launch programs (row, request) of a kernel that may take `others` too."""
        grid = (self.num_rows, self.num_reqs)
        self.launch(kernel, grid, self.all_blocks, JUDGE_NUM_WARPS, **others)

    def launch_residuals(self, kernel: Any, *num_rows: int) -> None:
        """Launch programs (blocks, request), or (blocks, row, request) for some rows."""
        some = min(RESIDUAL_BLOCKS_PER_PROGRAM, self.all_blocks)
        grid = (cdiv(self.rows.num_blocks, some), *num_rows, self.num_reqs)
        self.launch(kernel, grid, some, RESIDUAL_NUM_WARPS)

    def launch_draw(self, kernel: Any) -> None:
        """Launch programs (request), which write the outputs."""
        self.launch(kernel, (self.num_reqs,), self.all_blocks, DRAW_NUM_WARPS)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        num_blocks: int,
        num_warps: int,
        **others: Tensor,
    ) -> None:
        """Launch a kernel of the part, which takes what it names of the arguments.

        These are the part's tensors and tuples, `others`, and the constants `NUM_ROWS`, `NUM_STEPS`
        (a power of two at or above it), `NUM_SHARDS`, `NUM_CANDIDATES`, `NUM_BLOCKS` (of a
        program), `BLOCK_SIZE` and `VECTOR` (target logits that a thread reads at once, 16 bytes).
        """
        given = {
            "output": self.output,
            "sums": self.sums,
            "rows": self.rows,
            "target": self.target,
            "batch": self.batch,
            "cache": self.cache,
            **others,
            "NUM_ROWS": self.num_rows,
            "NUM_STEPS": next_power_of_2(self.num_rows),
            "NUM_SHARDS": self.num_shards,
            "NUM_CANDIDATES": self.num_candidates,
            "NUM_BLOCKS": num_blocks,
            "BLOCK_SIZE": BLOCK_SIZE,
            "VECTOR": 16 // self.target.logits.element_size(),
        }
        arguments = tuple(given[name] for name in kernel.arg_names)
        key = (self.key, num_blocks, specialisation(*others.values()))
        launch(kernel, grid, arguments, key, num_warps)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()


def in_parts(
    batch: RejectionBatch, verify: Callable[[Part], None], *, num_residuals: int
) -> RejectionOutput:
    """Verify a batch in parts of whole requests, so that scratch does not grow with the batch.

    Args:
        batch: of any size.
        verify: launches the kernels of a method.
        num_residuals: residuals a request whose blocks are summed.

    Returns:
        New tensors, the same whatever the parts.
    """
    output = RejectionOutput.empty(batch.draft_tokens)
    num_reqs = batch.num_reqs
    if num_reqs <= REQUESTS_AT_ONCE:
        if num_reqs:
            verify(prepare(batch, output, num_residuals))
        return output
    size = cdiv(num_reqs, cdiv(num_reqs, REQUESTS_AT_ONCE))
    for start in range(0, num_reqs, size):
        stop = min(start + size, num_reqs)
        rows = RejectionOutput(*(tensor[start:stop] for tensor in output))
        verify(prepare(batch.requests(start, stop), rows, num_residuals))
    return output


def prepare(batch: RejectionBatch, output: RejectionOutput, num_residuals: int) -> Part:
    """Scratch and arguments for the launches that verify `batch` into `output`."""
    device, cache = batch.target_logits.device, batch.cache
    num_blocks = cdiv(batch.vocab_size, BLOCK_SIZE)
    num_reqs, num_rows = batch.num_reqs, batch.num_rows
    num_records = num_reqs * num_rows
    as_floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
    floats = torch.empty(num_records * (NUM_FLOATS + num_blocks), **as_floats)
    ints = torch.empty(num_records * (NUM_INTS + num_blocks), dtype=torch.int32, device=device)
    if cache is None or num_residuals == 0:
        sums = floats  # never read
    else:
        sums = torch.empty(num_reqs * num_residuals * num_blocks, **as_floats)
    target = TargetArgs(batch.target_logits, batch.target_logits.stride(0), batch.vocab_size)
    requests = BatchArgs(
        draft_tokens=batch.draft_tokens,
        draft_stride=batch.draft_tokens.stride(0),
        idx_mapping=batch.idx_mapping,
        cu_num_logits=batch.cu_num_logits,
        positions=batch.positions,
        temperature=batch.temperature,
        seeds=batch.seeds,
    )
    stored = NO_CACHE if cache is None else cache_args(cache)
    num_shards = 1 if cache is None else cache.shard.num_shards
    key = specialisation(output, sums, floats, ints, target, requests, stored, num_rows, num_shards)
    return Part(
        output=output,
        sums=sums,
        rows=RowArgs(floats, ints, num_blocks),
        target=target,
        batch=requests,
        cache=stored,
        num_reqs=num_reqs,
        num_rows=num_rows,
        num_shards=num_shards,
        num_candidates=1 if stored.ids is None else next_power_of_2(stored.width),
        key=key,
    )
