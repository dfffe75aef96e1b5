"""`draft_sample` in Triton's interpreter against its torch twin; scratch and outputs are poisoned.

The interpreter truncates where it casts fp32 to bf16 (GPUs round), so rounding into the cache is
tested with fp16 here, and with bf16 in `tests/gpu`.
"""

import functools

import pytest
import torch
from draft_sample_cases import distance_to_boundary, make_batch, make_cache

from specreg.kernels.draft_sample import kernel
from specreg.kernels.draft_sample.kernel import draft_sample_triton
from specreg.kernels.draft_sample.reference import draft_sample_reference
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
    for implementation in (draft_sample_triton, draft_sample_reference):
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
        )
        results.append((ids, num_nans, cache))
    (ids, num_nans, cache), (twin_ids, twin_num_nans, twin) = results
    assert torch.equal(num_nans, twin_num_nans)
    differs = ids != twin_ids
    if bool(differs.any()):
        dtype = None if cache is None else cache.logits.dtype
        assert float(distance_to_boundary(batch, dtype, vocab_size)[differs].max()) < 1e-6
    if cache is not None:
        assert torch.equal(cache.logits.view(torch.uint8), twin.logits.view(torch.uint8))
        assert torch.equal(cache.state, twin.state)
        assert torch.equal(cache.temperature, twin.temperature)
        torch.testing.assert_close(cache.logsumexp, twin.logsumexp, rtol=1e-6, atol=1e-6)
    return ids, cache


@pytest.mark.parametrize(
    ("vocab_size", "width", "num_shards"),
    [(1, 1, 1), (513, 513, 4), (700, 1024, 2), (2600, 2100, 3)],
)
def test_every_rank_draws_and_stores_as_the_twin(vocab_size, width, num_shards):
    slots = [4, 0, -1, 2, 3, 1]
    batch = make_batch(slots, width, num_steps=2, temperature=[1, 0, 0.3, 1e-5, 0.7])
    for rank in range(num_shards):
        cache = functools.partial(make_cache, 5, 2, vocab_size, Shard(num_shards, rank))
        ids, _ = agree(batch, cache, vocab_size=vocab_size)
        assert ids[batch.idx_mapping < 0].eq(-1).all()
        assert ids.lt(min(width, vocab_size)).all()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(BF16, BF16), (FP16, FP16), (FP32, FP16), (BF16, FP32), (BF16, FP16), (FP16, FP32)],
)
def test_logits_are_rounded_to_any_cache_dtype_before_they_are_drawn_from(dtype, cache_dtype):
    batch = make_batch([1, 0, 2], 1000, dtype=dtype)
    agree(batch, lambda: make_cache(3, 1, 1000, Shard(2, 1), cache_dtype), vocab_size=1000)


def test_odd_logits_agree():
    batch = make_batch([0, 1, 2, 3, 4, 5, 6], 1100, temperature=[1, 1, 1, 1, 0, 0, 1e-38])
    x = batch.logits
    x[0, 700] = torch.nan
    x[1] = torch.nan
    x[2] = -torch.inf
    x[3, [3, 900]] = torch.inf
    x[4, :] = 1.0
    x[5, 512:] = -torch.inf
    x[6, :600] = torch.finfo(FP32).min
    ids, cache = agree(batch, lambda: make_cache(7, 1, 1100), vocab_size=1100)
    assert ids[[1, 2, 4]].tolist() == [0, 0, 0]
    assert int(ids[3]) in (3, 900)
    assert cache.state[:, 0].tolist() == [1, 0, 0, 1, 1, 1, 1]


def test_a_reduced_vocabulary_is_scattered():
    batch = make_batch([2, -1, 0, 1], 640, num_steps=2)
    target_ids = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:600]
    ids, cache = agree(
        batch, lambda: make_cache(3, 2, 3000), vocab_size=3000, target_ids=target_ids
    )
    assert set(ids[ids >= 0].tolist()) <= set(target_ids.tolist())
    outside = torch.ones(3000, dtype=torch.bool)
    outside[target_ids] = False
    assert cache.logits[..., outside].eq(-torch.inf).all()


def test_a_reduced_vocabulary_is_stored_as_it_is():
    batch = make_batch([2, -1, 0, 1], 640, num_steps=2)
    target_ids = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:600]
    cache = functools.partial(make_cache, 3, 2, 3000, Shard(2, 0), FP16, target_ids=target_ids)
    ids, stored = agree(batch, cache, vocab_size=3000, target_ids=target_ids)
    assert set(ids[ids >= 0].tolist()) <= set(target_ids.tolist())
    assert torch.equal(stored.logits[0, 0], batch.logits[4, :600].half())


@pytest.mark.parametrize("num_blocks", [1, 2, 16])
def test_the_size_of_a_program_does_not_show(num_blocks, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCKS_PER_PROGRAM", num_blocks)
    batch = make_batch([1, 0], 2100)
    agree(batch, lambda: make_cache(2, 1, 2100), vocab_size=2100)


@pytest.mark.parametrize("target_ids", [None, torch.arange(0, 1400, 2)])
def test_greedy_drafts_agree(target_ids):
    batch = make_batch([2, -1, 0], 700, temperature=0.5)
    agree(batch, lambda: None, vocab_size=1400, target_ids=target_ids, temperature=None)


def test_a_padded_cache_and_padded_logits_keep_their_canaries():
    batch = make_batch([1, 0], 600)
    wide = torch.full((2, 640), 99.0)
    wide[:, :600] = batch.logits
    batch = batch._replace(logits=wide[:, :600])
    cache = make_cache(2, 1, 600, padding=5)
    draft_sample_triton(*batch, cache, vocab_size=600, target_ids=None, num_nans=None)
    assert cache.logits._base[..., 600:].eq(7.25).all()
    assert torch.equal(cache.logits[:, 0], batch.logits.flip(0))


def test_an_empty_batch_launches_nothing():
    batch = make_batch([0], 16).rows([])
    ids = draft_sample_triton(*batch, None, vocab_size=16, target_ids=None, num_nans=None)
    assert ids.shape == (0,)


@pytest.mark.parametrize(
    ("scale", "temperature"), [(1e10, 1.0), (300.0, 1e-5), (30.0, 1e-7), (1e20, 1.0), (1e6, 0.5)]
)
def test_logits_far_larger_than_the_temperature_give_the_argmax(scale, temperature):
    """A shift of 2^24 is no longer the peak once it is rounded: 3 to 56 % of these were right."""
    num_tokens, vocab_size = 24, 600
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, vocab_size, generator=generator) * scale
    tokens = torch.arange(num_tokens)
    ids = draft_sample_triton(
        logits,
        tokens,
        torch.zeros_like(tokens),
        tokens,
        torch.full((num_tokens,), temperature),
        tokens,
        None,
        vocab_size=vocab_size,
        target_ids=None,
        num_nans=None,
    )
    assert torch.equal(ids, logits.argmax(1))
