"""The `markov_sample` kernels compile for GPUs that are not there, and address with 64 bits."""

import re

import pytest

pytest.importorskip("triton")

from markov_sample_variants import VARIANTS, kernels
from offline import compile_offline, narrow_products

DIVISION = re.compile(r"arith\.(rem|div|ceildiv|floordiv)\w*i\b")
ON_GFX942 = ("bf16, 256 requests, tp 4", "fp32 head, rank 100, tp 2", "reduced vocabulary, tp 4")


def compiled(variant, target="sm_90"):
    for kernel, arguments, options in kernels(**VARIANTS[variant], target=target):
        yield compile_offline(kernel, target, **options, **arguments)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_compiles_for_sm_90(variant):
    for stages in compiled(variant):
        assert stages["cubin"]
        assert narrow_products(stages["ttir"]) == [], "I5: 64 bits where 31 may be passed"


@pytest.mark.parametrize("variant", ON_GFX942)
def test_every_kernel_compiles_for_gfx942(variant):
    for stages in compiled(variant, "gfx942"):
        assert stages["hsaco"]


@pytest.mark.parametrize("variant", ["bf16, one request", "bf16, 256 requests, tp 4"])
def test_a_step_multiplies_on_tensor_cores_while_the_next_part_of_the_table_is_on_its_way(variant):
    """Whatever the number of requests, a column of the table is a row of the same instruction."""
    _, step, _ = compiled(variant)
    shapes = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+)n\d+(k\d+)", step["ptx"]))
    assert shapes == {("m64", "k16")}
    assert "cp.async.cg.shared.global" in step["ptx"]
    assert "griddepcontrol.wait" in step["ptx"]


@pytest.mark.parametrize("variant", ["bf16", "no cache", "greedy, capped and scaled"])
def test_i3_with_one_shard_owner_and_row_arithmetic_compile_away(variant):
    for stages in compiled(variant):
        assert not DIVISION.search(stages["ttir"])


def test_i3_would_be_noticed_with_four_shards():
    for stages in compiled("bf16, tp 4"):
        assert set(DIVISION.findall(stages["ttir"])) == {"div", "rem"}
