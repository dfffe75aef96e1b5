"""The kernels of paged attention compile for GPUs that are not there, and address with 64 bits."""

import re

import pytest
import torch

pytest.importorskip("triton")

from offline import TARGETS, compile_offline, narrow_products

from specreg.kernels.paged_attention import kernel as k
from specreg.kernels.paged_attention.arguments import (
    PartialArgs,
    PoolArgs,
    QueryArgs,
    TableArgs,
    rule_args,
)
from specreg.kernels.paged_attention.sizes import lanes_of, program_shape
from specreg.kernels.paged_attention.write.kernel import write_kv_kernel

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BLOCK_SIZE, NUM_KV_HEADS = 16, 8

VARIANTS = {
    "bf16, a query a request": {"num_tokens": 1},
    "bf16, 8 queries a request": {"num_tokens": 8},
    "bf16, split": {"is_split": True},
    "bf16, ragged": {"num_tokens": 16, "has_starts": True},
    "window, cap and sinks": {"num_tokens": 4, "sliding_window": 128, "soft_cap": 50.0},
    "split, window, cap and sinks": {"is_split": True, "sliding_window": 128, "soft_cap": 50.0},
    "fp16, head 64, a key head a query head": {"dtype": FP16, "group": 1, "head_dim": 64},
    "fp32": {"dtype": FP32, "num_tokens": 4},
    "head 80": {"head_dim": 80, "value_dim": 80},
    "keys 192, values 128": {"head_dim": 192, "group": 1},
    "head 256": {"head_dim": 256, "value_dim": 256, "num_tokens": 4},
    "head 512": {"head_dim": 512, "value_dim": 512, "group": 16},
}


def kernels(
    *,
    dtype=BF16,
    group=4,
    head_dim=128,
    value_dim=128,
    num_tokens=1,
    is_split=False,
    has_starts=False,
    sliding_window=None,
    soft_cap=None,
    is_hip=False,
):
    """Each kernel of one variant with its arguments, as a launch would pass them."""
    data, fp32 = torch.empty(0, dtype=dtype), torch.empty(0)
    i32, i64 = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    lanes = lanes_of(head_dim), lanes_of(value_dim)
    shape = program_shape(group, max(lanes), dtype.itemsize, is_hip)
    partials = PartialArgs(fp32, fp32, fp32) if is_split else None
    sinks = data if soft_cap else None
    pools = {
        name: PoolArgs(data, BLOCK_SIZE * NUM_KV_HEADS * dim, NUM_KV_HEADS * dim, dim)
        for name, dim in (("keys", head_dim), ("values", value_dim))
    }
    heads = {
        "VALUE_DIM": value_dim,
        "VALUE_LANES": lanes[1],
    }
    common = {**pools, "table": TableArgs(i32, 4096, 4096), "BLOCK_SIZE": BLOCK_SIZE, **heads}
    common |= {"KEY_DIM": head_dim, "KEY_LANES": lanes[0]}
    num_heads = group * NUM_KV_HEADS
    yield (
        k.paged_attention_kernel,
        shape.num_warps,
        {
            **common,
            "out": data,
            "partials": partials,
            "query": QueryArgs(data, num_heads * head_dim, head_dim, i64, i64, i64, num_heads),
            "rule": rule_args(0.1, sliding_window, soft_cap, sinks),
            "tile_starts": i32 if has_starts else None,
            "tile_tokens": num_tokens,
            "num_tokens": 2048,
            "GROUP": group,
            "HEADS": shape.heads,
            "ROWS": lanes_of(num_tokens * shape.heads),
            "KEYS": shape.keys,
            "PRECISION": shape.precision,
        },
    )
    if is_split:
        yield (
            k.combine_kernel,
            4,
            {"out": data, "partials": partials, "sinks": sinks, "SPLITS": 32, **heads},
        )
    rows = {
        name: PoolArgs(data, 0, NUM_KV_HEADS * dim, dim)
        for name, dim in (("key", head_dim), ("value", value_dim))
    }
    yield (
        write_kv_kernel,
        4,
        {
            **common,
            **rows,
            "slots": i64,
            "positions": i64,
            "NUM_HEADS": NUM_KV_HEADS,
            "HEADS": NUM_KV_HEADS,
        },
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_compiles_for(variant, target):
    is_hip = target == "gfx942"
    for kernel, num_warps, arguments in kernels(**VARIANTS[variant], is_hip=is_hip):
        stages = compile_offline(kernel, target, num_warps, **arguments)
        assert stages["cubin" if target == "sm_90" else "hsaco"]


def test_keys_and_values_are_read_16_bytes_at_a_time_while_others_are_computed_on():
    kernel, num_warps, arguments = next(kernels(num_tokens=8))
    ptx = compile_offline(kernel, "sm_90", num_warps, **arguments)["ptx"]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10", ptx)) >= 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_product_that_can_pass_31_bits_is_64_bit(variant):
    """Without a constant factor there is one 32-bit product: program times keys of its share."""
    for kernel, num_warps, arguments in kernels(**VARIANTS[variant]):
        ttir = compile_offline(kernel, "sm_90", num_warps, **arguments)["ttir"]
        assert len(narrow_products(ttir)) == (kernel is k.paged_attention_kernel)
