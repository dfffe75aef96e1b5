"""The `markov_sample` kernels compile for GPUs that are not there, and address with 64 bits."""

import re

import pytest
import torch

pytest.importorskip("triton")

from draft_sample_cases import make_cache
from markov_sample_cases import make_markov_batch
from markov_sample_variants import BF16, FP16, FP32, VARIANTS, kernels
from offline import compile_offline, narrow_products

from specreg.kernels.markov_sample import kernel as k
from specreg.kernels.markov_sample.arguments import HeadArgs

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


def launches(monkeypatch, batch, vocab_size, cache=None, **options):
    """What a call passes to each launch: kernel, arguments, options."""
    calls = []

    def record(kernel, grid, arguments, key, num_warps, **options):
        calls.append((kernel, arguments, {"num_warps": num_warps} | options))

    monkeypatch.setattr(k, "launch", record)
    options = {"target_ids": None, "scale": 1.0, "soft_cap": None, "num_nans": None} | options
    k.markov_sample_triton(*batch, cache, vocab_size=vocab_size, **options)
    return calls


@pytest.mark.parametrize(
    ("num_reqs", "rank", "dtype"),
    [(1, 256, BF16), (20, 16, FP16), (65, 64, BF16), (8, 300, BF16), (8, 64, FP32)],
)
def test_variants_are_compiled_with_the_options_of_a_launch(monkeypatch, num_reqs, rank, dtype):
    batch = make_markov_batch(list(range(num_reqs)), 40, num_steps=2, rank=rank, dtype=dtype)
    expected = [
        (kernel, {name: value for name, value in options.items() if value is not None})
        for kernel, _, options in kernels(
            num_reqs=num_reqs, num_steps=2, rank=rank, dtype=dtype, vocab_size=40, has_cache=False
        )
    ]
    launched = [(kernel, options) for kernel, _, options in launches(monkeypatch, batch, 40)]
    assert launched == expected


@pytest.mark.parametrize("num_steps", [1, 3])
def test_k_steps_are_k_plus_1_launches_and_one_more_into_a_dense_cache(monkeypatch, num_steps):
    batch = make_markov_batch([1, 0], 40, num_steps=num_steps, vocab_size=70)
    ids = torch.arange(40)
    for cache, target_ids, more in (
        (None, ids, 1),
        (make_cache(2, num_steps, 70), ids, 2),
        (make_cache(2, num_steps, 70, target_ids=ids), ids, 1),
        (make_cache(2, num_steps, 40), None, 1),
    ):
        vocab_size = 40 if target_ids is None else 70
        calls = launches(monkeypatch, batch, vocab_size, cache, target_ids=target_ids)
        assert len(calls) == num_steps + more


def test_a_scale_and_a_cap_that_are_integers_are_launched_as_floats(monkeypatch):
    """As integers they would be compiled for, and 30 finds the same compiled kernel as 30.0."""
    batch = make_markov_batch([0], 40)
    for _, arguments, _ in launches(monkeypatch, batch, 40, scale=2, soft_cap=30)[:-1]:
        (head,) = (each for each in arguments if isinstance(each, HeadArgs))
        assert [type(head.scale), type(head.soft_cap)] == [float, float]


@pytest.mark.parametrize("variant", ["bf16", "no cache", "rank 300", "fp32 head, rank 100, tp 2"])
def test_a_step_is_compiled_with_the_limit_on_registers_that_it_is_launched_with(variant):
    _, step, draw = compiled(variant)
    limit = re.findall(r"\.maxnreg (\d+)", step["ptx"])
    assert limit == (["128"] if variant in ("bf16", "no cache") else [])
    assert ".maxnreg" not in draw["ptx"]


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
