"""The `shard_plan` kernel on a GPU, against the twin."""

import dataclasses

import pytest
import torch

from specreg.kernels import shard_plan
from specreg.kernels.shard_plan.reference import shard_plan_reference
from specreg.ownership import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def random_maps(num_reqs, seed):
    """Distinct slots with padding rows among them, and offsets of 0 to 8 logits rows each."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(2 * num_reqs, generator=generator)[:num_reqs]
    is_padding = torch.rand(num_reqs, generator=generator) < 0.1
    counts = torch.randint(0, 9, (num_reqs,), generator=generator)
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return torch.where(is_padding, -1, slots).cuda(), cu.cuda(), int(cu[-1])


def assert_equal(plan, twin):
    for field in dataclasses.fields(plan):
        if field.name != "shard_idx":
            assert torch.equal(getattr(plan, field.name), getattr(twin, field.name)), field.name


@pytest.mark.parametrize("num_reqs", [0, 1, 63, 256, 1000])
@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_kernel_and_twin_agree(num_reqs, num_shards):
    idx_mapping, cu, num_logits = random_maps(num_reqs, seed=num_reqs)
    for rank in range(num_shards):
        shard = Shard(num_shards, rank)
        plan = shard_plan(idx_mapping, cu, shard, num_logits=num_logits + 5)
        assert_equal(plan, shard_plan_reference(idx_mapping, cu, shard, num_logits + 5))


def test_host_and_device_plans_agree():
    idx_mapping, cu, num_logits = random_maps(100, seed=4)
    shard = Shard(4, 2)
    on_device = shard_plan(idx_mapping, cu, shard, num_logits=num_logits).trimmed()
    on_host = shard_plan(idx_mapping.cpu(), cu.cpu(), shard)
    for field in dataclasses.fields(on_host):
        if field.name != "shard_idx":
            assert torch.equal(getattr(on_device, field.name).cpu(), getattr(on_host, field.name))


def test_planning_neither_synchronises_nor_escapes_a_graph():
    first, second = random_maps(64, seed=1), random_maps(64, seed=2)
    num_logits = max(first[2], second[2])
    idx_mapping, cu, _ = first
    shard_plan(idx_mapping, cu, Shard(4, 1), num_logits=num_logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = shard_plan(idx_mapping, cu, Shard(4, 1), num_logits=num_logits)
    idx_mapping.copy_(second[0])
    cu.copy_(second[1])
    graph.replay()
    assert_equal(plan, shard_plan_reference(idx_mapping, cu, Shard(4, 1), num_logits))
