"""`markov_sample` in Triton's interpreter against its torch twin; scratch and outputs are poisoned.

The interpreter truncates where it casts fp32 to bf16 (GPUs round), so logits are fp16 or fp32 here,
and bf16 in `tests/gpu`. The tables hold small multiples of 1/8: any order of summation is exact.
"""

import functools

import pytest
import torch
from draft_sample_cases import make_cache
from markov_sample_cases import make_markov_batch

from specreg.kernels.markov_sample.kernel import markov_sample_triton
from specreg.kernels.markov_sample.reference import markov_bias_reference, markov_sample_reference
from specreg.ownership import Shard

FP32, FP16 = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def agree(batch, cache_of, *, vocab_size, greedy=False, **options):
    """Run kernel and twin, each on its own poisoned cache, and compare every output byte."""
    options = {"target_ids": None, "scale": 1.0, "soft_cap": None} | options
    results = []
    for implementation in (markov_sample_triton, markov_sample_reference):
        cache = cache_of()
        num_nans = torch.zeros_like(batch.seeds, dtype=torch.int32)
        tokens = implementation(
            *batch[:6],
            None if greedy else batch.temperature,
            batch.seeds,
            cache,
            vocab_size=vocab_size,
            num_nans=num_nans,
            **options,
        )
        results.append((tokens, num_nans, cache))
    (tokens, num_nans, cache), (twin_tokens, twin_num_nans, twin) = results
    assert torch.equal(num_nans, twin_num_nans)
    assert torch.equal(tokens, twin_tokens)
    if cache is not None:
        assert torch.equal(cache.logits.view(torch.uint8), twin.logits.view(torch.uint8))
        assert torch.equal(cache.state, twin.state)
        assert torch.equal(cache.temperature, twin.temperature)
        torch.testing.assert_close(cache.logsumexp, twin.logsumexp, rtol=1e-6, atol=1e-6)
    return tokens, cache


@pytest.mark.parametrize(
    ("vocab_size", "rank", "num_shards"), [(1, 16, 1), (513, 16, 2), (1100, 100, 1)]
)
def test_every_rank_draws_and_stores_as_the_twin(vocab_size, rank, num_shards):
    slots = [4, 0, -1, 2]
    batch = make_markov_batch(slots, vocab_size, rank=rank, temperature=[1, 0, 0.3, 1e-5, 0.7])
    for shard_idx in range(num_shards):
        cache = functools.partial(make_cache, 5, 3, vocab_size, Shard(num_shards, shard_idx))
        tokens, _ = agree(batch, cache, vocab_size=vocab_size)
        assert tokens[2].tolist() == [-1, -1, -1]


def test_requests_beyond_a_tile_and_a_cache_of_another_dtype_agree():
    slots = list(range(19))
    batch = make_markov_batch(slots, 530, num_steps=2, rank=32, dtype=FP16)
    agree(batch, lambda: make_cache(19, 2, 530, Shard(2, 1), FP32), vocab_size=530)


@pytest.mark.parametrize("num_shards", [0, 1, 2])
def test_a_single_step_agrees_with_and_without_a_cache(num_shards):
    batch = make_markov_batch([2, -1, 0], 530, num_steps=1)

    def cache():
        return make_cache(3, 1, 530, Shard(num_shards, 0)) if num_shards else None

    tokens, _ = agree(batch, cache, vocab_size=530)
    assert tokens.shape == (3, 1)
    agree(batch, lambda: None, vocab_size=530, greedy=True)


def test_odd_logits_agree():
    batch = make_markov_batch(
        [0, 1, 2, 3, 4, 5, 6], 600, num_steps=2, temperature=[1, 1, 1, 1, 0, 0, 1e-38]
    )
    x = batch.base_logits[:, 0]
    x[0, 550] = torch.nan
    x[1] = torch.nan
    x[2] = -torch.inf
    x[3, [3, 590]] = torch.inf
    x[4, 7] = torch.nan
    x[5, 512:] = -torch.inf
    x[6, :500] = torch.finfo(FP32).min
    tokens, cache = agree(batch, lambda: make_cache(7, 2, 600), vocab_size=600)
    assert tokens[[1, 2], 0].tolist() == [0, 0]
    assert cache.state[:, 0].tolist() == [1, 0, 0, 1, 1, 1, 1]
    agree(batch, lambda: None, vocab_size=600, greedy=True)


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_reduced_vocabulary_agrees_in_both_layouts(is_dense):
    batch = make_markov_batch([2, -1, 0, 1], 600, vocab_size=2000, num_steps=2)
    target_ids = torch.randperm(2000, generator=torch.Generator().manual_seed(1))[:600]
    tokens, _ = agree(
        batch,
        lambda: make_cache(
            3, 2, 2000, Shard(2, 0), FP16, target_ids=None if is_dense else target_ids
        ),
        vocab_size=2000,
        target_ids=target_ids,
    )
    assert set(tokens[tokens >= 0].tolist()) <= set(target_ids.tolist())


def test_a_bias_that_is_capped_and_scaled_agrees():
    batch = make_markov_batch([1, 0], 520, num_steps=2, dtype=FP16)
    agree(batch, lambda: None, vocab_size=520, scale=0.5, soft_cap=3.0, greedy=True)


def test_an_infinite_bias_is_capped_as_by_the_twin():
    """A sum that fp16 cannot hold is an infinity; its cap is a number."""
    batch = make_markov_batch([1, 0, 2], 520, num_steps=2, dtype=FP16)
    batch = batch._replace(w1=batch.w1 * 400, w2=batch.w2 * 400)
    bias = markov_bias_reference(batch.anchors, batch.w1, batch.w2, dtype=FP16)
    assert set(bias[bias.isinf()].tolist()) == {-torch.inf, torch.inf}
    _, cache = agree(
        batch, lambda: make_cache(3, 2, 520, dtype=FP16), vocab_size=520, scale=0.5, soft_cap=4.0
    )
    assert bool(cache.logits.isfinite().all())


def test_an_anchor_outside_the_table_and_padded_tables_agree():
    batch = make_markov_batch([1, 0], 520, num_steps=2)
    wide = [torch.full((len(table) + 8, 24), 99.0) for table in (batch.w1, batch.w2)]
    for padded, table in zip(wide, (batch.w1, batch.w2), strict=True):
        padded[: len(table), :16] = table
    wide[0][0] = torch.inf  # not read
    batch = batch._replace(
        anchors=torch.tensor([-1, 2**40]), w1=wide[0][:, :16], w2=wide[1][:, :16]
    )
    agree(batch, lambda: make_cache(2, 2, 520, padding=5), vocab_size=520)


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_cells_are_filled_behind_the_last_column(shard):
    batch = make_markov_batch([2, 0, 1], 520, num_steps=2, vocab_size=1100)
    _, cache = agree(batch, lambda: make_cache(3, 2, 1100, shard, padding=5), vocab_size=1100)
    assert bool((cache.logits[0, :, 520:] == -torch.inf).all())


def test_an_empty_batch_launches_nothing():
    batch = make_markov_batch([0], 16).rows([])
    tokens, _ = agree(batch, lambda: None, vocab_size=16)
    assert tokens.shape == (0, 3)
