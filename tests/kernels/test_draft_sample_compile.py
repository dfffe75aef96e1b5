"""The `draft_sample` kernels compile for GPUs that are not there, and address with 64 bits."""

import re

import pytest
import torch

pytest.importorskip("triton")

from draft_sample_variants import VARIANTS, kernels
from offline import TARGETS, compile_offline, narrow_products

from specreg.kernels.draft_sample.kernel import NUM_WARPS

DIVISION = re.compile(r"arith\.(rem|div|ceildiv|floordiv)\w*i\b")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_compiles_for(variant, target):
    for kernel, arguments in kernels(**VARIANTS[variant]):
        stages = compile_offline(kernel, target, **arguments)
        assert stages["cubin" if target == "sm_90" else "hsaco"]


def ptx_of_blocks(**variant):
    kernel, arguments = next(iter(kernels(num_shards=4, **variant)))
    return compile_offline(kernel, "sm_90", num_warps=NUM_WARPS, **arguments)["ptx"]


def test_logits_are_read_and_stored_16_bytes_at_a_time():
    """Eight vectors a thread, in programs with masks and in those without."""
    ptx = ptx_of_blocks()
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 16
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_warp_reduces_whole_blocks_without_shared_memory(dtype):
    """Four blocks a warp: one instruction each for the peak and for the mass of a block."""
    ptx = ptx_of_blocks(dtype=dtype, cache_dtype=dtype)
    for operation in ("max", "add"):
        assert len(re.findall(rf"redux\.sync\.{operation}\.s32", ptx)) == 4
    assert "shfl" not in ptx


def test_a_weight_takes_one_multiply_add_and_one_exponential():
    ptx = ptx_of_blocks()
    assert len(re.findall(r"ex2\.approx", ptx)) == 64
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == 64


@pytest.mark.parametrize("variant", ["bf16", "fp16 into fp32", "no cache", "greedy"])
def test_i3_with_one_shard_owner_and_row_arithmetic_compile_away(variant):
    for kernel, arguments in kernels(**VARIANTS[variant]):
        assert not DIVISION.search(compile_offline(kernel, "sm_90", **arguments)["ttir"])


def test_i3_would_be_noticed_with_two_shards():
    for kernel, arguments in kernels(num_shards=2):
        divisions = DIVISION.findall(compile_offline(kernel, "sm_90", **arguments)["ttir"])
        assert set(divisions) == {"div", "rem"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_i5_every_product_that_can_pass_31_bits_is_64_bit(variant):
    for kernel, arguments in kernels(**VARIANTS[variant]):
        assert narrow_products(compile_offline(kernel, "sm_90", **arguments)["ttir"]) == []
