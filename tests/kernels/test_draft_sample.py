"""`draft_sample` on the CPU: what it returns and stores, and what it refuses."""

import dataclasses

import pytest
import torch
from draft_sample_cases import POISON, Batch, make_batch, make_cache

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import CELL_EMPTY, CELL_STORED
from specreg.errors import TensorError
from specreg.kernels import draft_sample
from specreg.kernels.draft_sample import reference
from specreg.ownership import Shard

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def draw(batch, cache=None, vocab_size=None, **kwargs):
    vocab_size = batch.logits.shape[1] if vocab_size is None else vocab_size
    return draft_sample(*batch, cache, vocab_size=vocab_size, **kwargs)


# Draws


def test_draws_follow_the_draft_distribution_and_those_of_other_steps_are_independent():
    """Chi-square with 4 df, reject above 23.5; a draw that reuses its noise scores 8e4."""
    q = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04])
    num_draws = 20_000
    slots = torch.arange(num_draws)
    batch = Batch(
        logits=q.log().expand(num_draws, -1).contiguous(),
        idx_mapping=slots,
        steps=torch.zeros_like(slots),
        positions=torch.full_like(slots, 17),
        temperature=torch.ones(num_draws),
        seeds=slots,
    )
    first = draw(batch)
    second = draw(batch._replace(steps=torch.ones_like(slots), positions=batch.positions + 1))
    for tokens in (first, second):
        counts = torch.bincount(tokens, minlength=5)
        assert float(((counts - num_draws * q) ** 2 / (num_draws * q)).sum()) < 23.5

    def dependence(a, b):
        joint = torch.bincount(a * 5 + b, minlength=25).view(5, 5).double()
        expected = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True) / num_draws
        return float(((joint - expected) ** 2 / expected).sum())

    assert dependence(first, second) < 45  # 16 df, 5 sigma
    assert dependence(first, first) > 5e4


def test_a_temperature_scales_the_logits():
    q = torch.tensor([0.5, 0.3, 0.2])
    slots = torch.arange(20_000)
    batch = Batch(
        logits=(q.log() * 0.3).expand(len(slots), -1).contiguous(),
        idx_mapping=slots,
        steps=slots * 0,
        positions=slots * 0,
        temperature=torch.full((len(slots),), 0.3),
        seeds=slots,
    )
    counts = torch.bincount(draw(batch), minlength=3)
    expected = len(slots) * q
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # 2 df, 1e-3.5


def test_temperature_zero_takes_the_largest_logit_the_lowest_id_on_ties():
    batch = make_batch([0, 1, 2], 1500, temperature=0.0)
    batch.logits[0, [1400, 700, 701]] = 50.0
    batch.logits[1] = -3.0
    cache = make_cache(3, 1, 1500)
    ids = draw(batch, cache)
    assert ids.tolist() == [700, 0, int(batch.logits[2].argmax())]
    assert cache.temperature[:, 0].tolist() == [0.0] * 3
    assert cache.state[:, 0].tolist() == [CELL_STORED] * 3


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-38, 1e-45])
def test_a_tiny_temperature_is_the_argmax_and_changes_no_neighbour(temperature):
    batch = make_batch([0, 1, 2, 3], 1000, temperature=[1.0, temperature] * 2, scale=10)
    batch.logits[3, 5] = 60.0
    ids = draw(batch)
    assert ids[[1, 3]].tolist() == batch.logits[[1, 3]].argmax(-1).tolist()
    assert torch.equal(draw(batch.rows([0, 2])), ids[[0, 2]])


def test_greedy_ignores_temperatures():
    batch = make_batch([0, 1, 2], 600, temperature=5.0)
    assert torch.equal(draw(batch, greedy=True), batch.logits.argmax(-1))


# Odd logits


def test_a_nan_counts_as_minus_infinity_and_is_counted_once_a_row():
    batch = make_batch([0, 1, 2], 700, num_steps=2)
    clean = batch.logits.clone()
    batch.logits[0, :650] = torch.nan
    batch.logits[4, 3] = torch.nan
    batch.logits[5, 3] = torch.nan
    clean[0, :650] = clean[4:6, 3] = -torch.inf
    num_nans = torch.tensor([10, 0, 0], dtype=torch.int32)
    ids = draw(batch, num_nans=num_nans)
    assert num_nans.tolist() == [11, 0, 2]
    assert torch.equal(ids, draw(batch._replace(logits=clean)))


@pytest.mark.parametrize("vocab_size", [1, 513, 8193, 10_000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_with_nothing_to_draw_gives_token_0_is_flagged_and_leaves_its_cell_empty(
    vocab_size, temperature, value
):
    batch = make_batch([0, 1, 2], vocab_size, temperature=temperature)
    batch.logits[1] = value
    cache, num_nans = make_cache(3, 1, vocab_size), torch.zeros(3, dtype=torch.int32)
    ids = draw(batch, cache, num_nans=num_nans)
    assert int(ids[1]) == 0
    assert num_nans.tolist() == [0, 1, 0]
    assert cache.state[:, 0].tolist() == [CELL_STORED, CELL_EMPTY, CELL_STORED]
    assert torch.equal(draw(batch.rows([0, 2])), ids[[0, 2]])
    assert bool(cache.logsumexp.isfinite().all())


def test_infinite_logits_share_the_probability():
    batch = make_batch([0], 1200)
    batch.logits[0, [7, 600, 1100]] = torch.inf
    drawn = {
        int(draw(batch._replace(positions=torch.tensor([position])))) for position in range(40)
    }
    assert drawn == {7, 600, 1100}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_column_of_probability_0_or_beyond_the_vocabulary_is_ever_drawn(temperature):
    """All mass is in the first block; the last is -inf, masked or padding with larger logits."""
    vocab_size = 8193
    batch = make_batch([0], vocab_size + 63, temperature=temperature)
    batch.logits[0, 40:vocab_size] = -torch.inf
    batch.logits[0, vocab_size:] = 100.0
    for position in range(200):
        there = batch._replace(positions=torch.tensor([position]))
        assert int(draw(there, vocab_size=vocab_size)) < 40


# Store


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, BF16), (FP32, BF16), (FP32, FP16)])
def test_tokens_are_drawn_from_the_stored_bits(dtype, cache_dtype):
    """10,000 rows of near-ties: the cache row is the rounded logits, and draws the same tokens.

    Drawing from unrounded fp32 logits, the broken variant, gives other tokens in about 1% of the
    rows.
    """
    rows = 10_000
    batch = make_batch(list(range(rows)), 32, scale=0.01)
    batch = batch._replace(logits=(batch.logits + 8.0).to(dtype))
    cache = make_cache(rows, 1, 32, dtype=cache_dtype)
    ids = draw(batch, cache)
    stored = cache.logits[:, 0].contiguous()
    assert torch.equal(stored.view(torch.uint8), batch.logits.to(cache_dtype).view(torch.uint8))
    assert torch.equal(draw(batch._replace(logits=stored)), ids)
    greedy = batch._replace(temperature=torch.zeros(rows))
    assert torch.equal(draw(greedy, cache), stored.float().argmax(-1))
    if dtype != cache_dtype:
        assert int((draw(batch) != ids).sum()) > 10


def test_a_rank_that_does_not_own_the_row_draws_from_the_same_rounded_bits():
    batch = make_batch(list(range(2000)), 32, scale=0.01)
    ids = [draw(batch, make_cache(2000, 1, 32, Shard(2, rank), BF16)).tolist() for rank in range(2)]
    assert ids[0] == ids[1]


def test_the_cell_keeps_the_temperature_it_was_drawn_at():
    batch = make_batch([1, 0], 50, temperature=[0.5, 2.0])
    cache = make_cache(2, 1, 50)
    draw(batch, cache)
    assert cache.temperature[:, 0].tolist() == [0.5, 2.0]
    expected = (batch.logits.flip(0) / cache.temperature).logsumexp(-1)
    torch.testing.assert_close(cache.logsumexp[:, 0], expected)


def test_a_narrower_head_has_probability_0_beyond_its_width():
    batch = make_batch([0, 1], 600)
    cache = make_cache(2, 1, 1400)
    ids = draw(batch, cache, vocab_size=1400)
    assert bool((ids < 600).all())
    assert bool((cache.logits[..., 600:] == -torch.inf).all())
    assert torch.equal(cache.logits[:, 0, :600], batch.logits)
    assert torch.equal(ids, draw(batch))


def test_a_reduced_vocabulary_is_scattered_and_its_ids_come_back_as_target_ids():
    """d2t offsets [1, 2, 2, 3] name the target ids 1, 3, 4 and 6."""
    target_ids = torch.tensor([1, 3, 4, 6])
    batch = make_batch(list(range(64)), 4, scale=1)
    cache = make_cache(64, 1, 8)
    ids = draw(batch, cache, vocab_size=8, target_ids=target_ids)
    assert set(ids.tolist()) == {1, 3, 4, 6}
    assert torch.equal(ids, target_ids[draw(batch)])
    assert torch.equal(cache.logits[:, 0, target_ids], batch.logits)
    assert bool((cache.logits[:, 0, [0, 2, 5, 7]] == -torch.inf).all())
    torch.testing.assert_close(cache.logsumexp[:, 0], batch.logits.logsumexp(-1))


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_layout_draft_vocab_keeps_the_columns_and_draws_the_same_tokens(shard, dtype):
    target_ids = torch.randperm(3000, generator=torch.Generator().manual_seed(2))[:700]
    batch = make_batch([3, -1, 0, 2, 1], 700, num_steps=2, temperature=[1, 0, 0.5, 2])
    dense = make_cache(4, 2, 3000, shard, dtype)
    reduced = make_cache(4, 2, 3000, shard, dtype, padding=3, target_ids=target_ids)
    ids = draw(batch, reduced, vocab_size=3000, target_ids=target_ids)
    assert torch.equal(ids, draw(batch, dense, vocab_size=3000, target_ids=target_ids))
    for field in ("temperature", "logsumexp", "state"):
        assert torch.equal(getattr(reduced, field), getattr(dense, field))
    is_stored = dense.state == CELL_STORED
    assert torch.equal(reduced.logits[is_stored], dense.logits[is_stored][:, target_ids])
    assert bool((reduced.logits._base[..., 700:] == POISON).all())


def test_a_cache_of_a_reduced_vocabulary_is_refused_without_its_map():
    batch = make_batch([0, 1], 8)
    cache = make_cache(2, 1, 8, target_ids=torch.tensor([1, 3, 4, 6]))
    for target_ids in (None, torch.arange(5)):
        with pytest.raises(TensorError, match=r"the map that it was allocated for[^$]*allowed: 4"):
            draw(batch, cache, target_ids=target_ids)


def test_a_cache_of_candidates_takes_no_whole_rows():
    batch = make_batch([0, 1], 8)
    cache = make_cache(2, 1, 8)
    cache = dataclasses.replace(cache, ids=torch.full((2, 1, 3), -1, dtype=torch.int32))
    with pytest.raises(TensorError, match=r"cache of candidates[^$]*sample_candidates"):
        draw(batch, cache)


def test_a_batch_too_large_to_work_on_at_once_gives_the_same_tokens(monkeypatch):
    batch = make_batch([3, -1, 0, 2, 1], 1000, num_steps=3)
    cache = make_cache(4, 3, 1000)
    ids = draw(batch, cache)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1)
    chunked = make_cache(4, 3, 1000)
    assert torch.equal(draw(batch, chunked), ids)
    for field in ("logits", "temperature", "logsumexp", "state"):
        assert torch.equal(getattr(cache, field), getattr(chunked, field))


# Refusals


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, r"logits\).*\n.*float64"),
        ({"logits": torch.zeros(8)}, r"logits.flatten\(0, -2\)"),
        ({"logits": torch.zeros(8, 2).T}, r"stride 1 between columns"),
        ({"logits": torch.zeros(2, 0)}, "nothing to sample from"),
        ({"idx_mapping": torch.zeros(2, dtype=torch.int32)}, r"idx_mapping\)"),
        ({"idx_mapping": torch.zeros(3, dtype=torch.int64)}, r"allowed: int64 \[2\]"),
        ({"steps": torch.zeros(4, dtype=torch.int64)[::2]}, r"steps\)[^$]*contiguous"),
        ({"positions": torch.zeros(2)}, r"positions\)"),
        ({"temperature": torch.ones(4, dtype=torch.float64)}, r"temperature\)"),
        ({"temperature": torch.ones(3)}, r"one value a slot"),
        ({"seeds": torch.zeros(4, 1, dtype=torch.int64)}, r"seeds\)"),
        ({"seeds": torch.zeros(4, dtype=torch.int64, device="meta")}, r"seeds\)[^$]*meta"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_with_what_to_pass(change, match):
    batch = make_batch([0, 1], 8, max_num_seqs=4)._replace(**change)
    with pytest.raises(TensorError, match=match):
        draft_sample(*batch, None, vocab_size=8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"logits": torch.zeros(4, 1, 9)}, r"cache\).logits"),
        ({"logits": torch.zeros(4, 8, 1).transpose(1, 2).expand(4, 1, 8)[..., ::1]}, None),
        ({"logits": torch.zeros(4, 1, 16)[..., ::2]}, "slice rows and steps only"),
        ({"temperature": torch.zeros(4, 2)[:, :1]}, r"temperature[^$]*contiguous"),
        ({"state": torch.zeros(4, 1)}, r"cache\).state"),
        ({"layout": DraftLogitsLayout.TOP_K}, "layout top_k"),
        ({"vocab_size": 9}, "allocated for the op's vocab_size"),
        ({"shard": Shard(3, 0)}, None),
        ({"logits": torch.zeros(3, 1, 8)}, "3 rows for 4 slots"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_with_what_to_pass(change, match):
    batch = make_batch([0, 1], 8, max_num_seqs=4)
    cache = dataclasses.replace(make_cache(4, 1, 8), **change)
    if match is None:
        draw(batch, cache)
    else:
        with pytest.raises(TensorError, match=match):
            draw(batch, cache)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"greedy": True, "cache": True}, "no distribution to store"),
        ({"target_ids": torch.arange(9)}, "9 columns in use"),
        ({"target_ids": torch.arange(4, dtype=torch.int32)}, r"target_ids\)"),
        ({"num_nans": torch.zeros(4, dtype=torch.int64)}, r"num_nans\)"),
    ],
)
def test_options_that_do_not_fit_are_refused(kwargs, match):
    batch = make_batch([0, 1], 8, max_num_seqs=4)
    cache = make_cache(4, 1, 8) if kwargs.pop("cache", False) else None
    with pytest.raises(TensorError, match=match):
        draw(batch, cache, **kwargs)


def test_an_empty_batch_draws_nothing():
    assert draw(make_batch([0], 8).rows([])).shape == (0,)
