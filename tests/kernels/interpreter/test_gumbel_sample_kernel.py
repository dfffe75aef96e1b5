"""`gumbel_sample` in the interpreter against its twin; scratch and outputs are poisoned."""

import functools

import pytest
import torch
from draft_sample_cases import make_batch, make_cache

from specreg.kernels.gumbel_sample import kernel
from specreg.kernels.gumbel_sample.kernel import gumbel_sample_triton
from specreg.kernels.gumbel_sample.reference import gumbel_sample_reference
from specreg.ownership import Shard

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def agree(batch, cache_of, *, vocab_size, target_ids=None, temperature="batch"):
    """Run kernel and twin, each on its own poisoned cache, and compare every output byte."""
    temperature = batch.temperature if temperature == "batch" else temperature
    results = []
    for implementation in (gumbel_sample_triton, gumbel_sample_reference):
        cache = cache_of()
        num_nans = torch.zeros_like(batch.seeds, dtype=torch.int32)
        ids = implementation(
            *batch[:4],
            temperature,
            batch.seeds,
            cache,
            vocab_size=vocab_size,
            target_ids=target_ids,
            num_nans=num_nans,
            noise_steps=(batch.steps * 3).contiguous(),
        )
        results.append((ids, num_nans, cache))
    (ids, num_nans, cache), (twin_ids, twin_num_nans, twin) = results
    assert torch.equal(num_nans, twin_num_nans)
    assert torch.equal(ids, twin_ids)
    if cache is not None:
        assert torch.equal(cache.logits.view(torch.uint8), twin.logits.view(torch.uint8))
        assert torch.equal(cache.state, twin.state)
        assert torch.equal(cache.temperature, twin.temperature)
        torch.testing.assert_close(cache.logsumexp, twin.logsumexp, rtol=1e-6, atol=1e-6)
    return ids


@pytest.mark.parametrize(
    ("vocab_size", "width", "num_shards"), [(1, 1, 1), (513, 513, 3), (2600, 2100, 2)]
)
def test_every_rank_draws_and_stores_as_the_twin(vocab_size, width, num_shards):
    slots = [4, 0, -1, 2, 3, 1]
    batch = make_batch(slots, width, num_steps=2, temperature=[1, 0, 0.3, 1e-5, 0.7])
    for rank in range(num_shards):
        cache = functools.partial(make_cache, 5, 2, vocab_size, Shard(num_shards, rank))
        ids = agree(batch, cache, vocab_size=vocab_size)
        assert ids[batch.idx_mapping < 0].eq(-1).all()
        assert ids.lt(min(width, vocab_size)).all()


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, BF16), (FP32, FP16), (FP16, FP32)])
def test_logits_are_rounded_before_they_are_drawn_from(dtype, cache_dtype):
    batch = make_batch([1, 0, 2], 1000, dtype=dtype)
    agree(batch, lambda: make_cache(3, 1, 1000, Shard(2, 1), cache_dtype), vocab_size=1000)


@pytest.mark.parametrize("layout", ["scattered", "draft_vocab"])
def test_a_reduced_vocabulary_agrees(layout):
    batch = make_batch([2, -1, 0, 1], 640, num_steps=2)
    target_ids = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:600]
    kwargs = {"target_ids": target_ids} if layout == "draft_vocab" else {}
    cache = functools.partial(make_cache, 3, 2, 3000, **kwargs)
    agree(batch, cache, vocab_size=3000, target_ids=target_ids)


def test_odd_logits_and_greedy_drafts_agree():
    batch = make_batch([0, 1, 2, 3, 4, 5, 6], 1100, temperature=[1, 1, 1, 1, 0, 0, 1e-38])
    x = batch.logits
    x[0, 700] = torch.nan
    x[1] = torch.nan
    x[2] = -torch.inf
    x[3, [3, 900]] = torch.inf
    x[4, :] = 1.0
    x[5, 512:] = -torch.inf
    x[6, :] = torch.finfo(FP32).min
    x[6, :40] = -torch.inf
    ids = agree(batch, lambda: make_cache(7, 1, 1100), vocab_size=1100)
    assert ids[[1, 2, 4]].tolist() == [0, 0, 0]
    assert int(ids[6]) >= 40
    agree(batch, lambda: None, vocab_size=1100, temperature=None)


@pytest.mark.parametrize("num_blocks", [1, 8])
def test_the_size_of_a_program_does_not_show(num_blocks, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCKS_PER_PROGRAM", num_blocks)
    batch = make_batch([1, 0], 2100)
    agree(batch, lambda: make_cache(2, 1, 2100), vocab_size=2100)
