"""The `shard_plan` kernel compiles for GPUs that are not there."""

import pytest
import torch

pytest.importorskip("triton")

from offline import TARGETS, compile_offline

from specreg.kernels.shard_plan.kernel import shard_plan_kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_shards", [1, 4, 6])
def test_the_kernel_compiles_for(num_shards, dtype, target):
    i64, offsets = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=dtype)
    outputs = ("order", "restore", "logits_per_rank", "reqs_per_rank", "local_reqs")
    stages = compile_offline(
        shard_plan_kernel,
        target,
        num_warps=1,
        **dict.fromkeys(outputs, i64),
        local_idx_mapping=i64,
        local_cu_num_logits=offsets,
        idx_mapping=i64,
        cu_num_logits=offsets,
        num_reqs=64,
        num_logits=512,
        NUM_SHARDS=num_shards,
        SHARD_IDX=num_shards - 1,
        REQS=64,
        ROWS=64,
    )
    assert stages["cubin" if target == "sm_90" else "hsaco"]
