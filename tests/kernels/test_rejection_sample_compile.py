"""The `rejection_sample` kernels compile for GPUs that are not there, and address with 64 bits."""

import re

import pytest

pytest.importorskip("triton")

from offline import TARGETS, compile_offline, narrow_products
from rejection_sample_variants import BLOCK_VARIANTS, VARIANTS, kernels

DIVISION = re.compile(r"arith\.(rem|div|ceildiv|floordiv)\w*i\b")

# Divisions that have nothing to do with owners: a draft's block.
OTHER_DIVISIONS = {"blocks": [], "judge": [], "residual": [], "draw": ["div"]}


def divisions(ttir):
    return sorted(DIVISION.findall(ttir))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_compiles_and_addresses_with_64_bits(variant, target):
    for kernel, arguments, num_warps in kernels(**VARIANTS[variant]).values():
        stages = compile_offline(kernel, target, num_warps=num_warps, **arguments)
        assert stages["cubin" if target == "sm_90" else "hsaco"]
        assert narrow_products(stages["ttir"]) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("method", "variant"), [("synthetic", "bf16"), *(("block", name) for name in BLOCK_VARIANTS)]
)
def test_every_kernel_of_other_methods_compiles_and_addresses_with_64_bits(method, variant, target):
    for kernel, arguments, num_warps in kernels(method, **VARIANTS[variant]).values():
        stages = compile_offline(kernel, target, num_warps=num_warps, **arguments)
        assert stages["cubin" if target == "sm_90" else "hsaco"]
        assert narrow_products(stages["ttir"]) == []


@pytest.mark.parametrize("name", ["blocks", "residual"])
def test_logits_are_read_16_bytes_at_a_time(name):
    kernel, arguments, num_warps = kernels(num_shards=4)[name]
    ptx = compile_offline(kernel, "sm_90", num_warps=num_warps, **arguments)["ptx"]
    # A row's last program has code of its own; a residual takes two tensors.
    num_copies = {"blocks": 2, "residual": 2}[name]
    num_bytes = num_copies * arguments["NUM_BLOCKS"] * arguments["BLOCK_SIZE"] * 2
    num_loads = len(re.findall(r"ld\.global\.v4\.b32", ptx))
    assert num_loads * 16 * 32 * num_warps == num_bytes


def test_with_one_shard_owner_and_row_arithmetic_compile_away():
    for name, (kernel, arguments, _) in kernels().items():
        ttir = compile_offline(kernel, "sm_90", **arguments)["ttir"]
        assert divisions(ttir) == OTHER_DIVISIONS[name]


def test_owner_and_row_arithmetic_would_be_noticed_with_two_shards():
    for name, (kernel, arguments, _) in kernels(num_shards=2).items():
        if name != "blocks":
            ttir = compile_offline(kernel, "sm_90", **arguments)["ttir"]
            assert divisions(ttir) == sorted([*OTHER_DIVISIONS[name], "div", "rem"])
