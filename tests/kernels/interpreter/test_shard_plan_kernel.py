"""`shard_plan` in Triton's interpreter against its torch twin."""

import dataclasses

import pytest
import torch

from specreg.kernels.shard_plan.kernel import shard_plan_triton
from specreg.kernels.shard_plan.reference import shard_plan_reference
from specreg.ownership import Shard

BATCHES = {
    "mixed": ([5, -1, 0, 3, 8, 2, 7], [2, 1, 0, 3, 1, 4, 0]),
    "one owner": ([0, 4, 8], [4, 4, 4]),
    "one request": ([3], [70]),  # more rows than one pass of the copying loop
    "only padding": ([-1, -1], [0, 2]),
    "empty": ([], []),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_kernel_agrees_with_its_twin_on_every_rank(batch, num_shards, dtype):
    idx, counts = BATCHES[batch]
    poisoned = torch.full((len(idx) + 3,), 1_000_000, dtype=dtype)
    cu = poisoned[1:-1]
    cu[:] = torch.tensor([0, *counts]).cumsum(0)
    num_logits = sum(counts) + 2
    for rank in range(num_shards):
        args = (torch.tensor(idx, dtype=torch.int64), cu, Shard(num_shards, rank), num_logits)
        plan, twin = shard_plan_triton(*args), shard_plan_reference(*args)
        for field in dataclasses.fields(plan):
            got, expected = getattr(plan, field.name), getattr(twin, field.name)
            if field.name != "shard_idx":
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected), field.name
