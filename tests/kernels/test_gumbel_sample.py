"""`gumbel_sample` on the CPU: its law, what it shares with `draft_sample`, and what it keeps."""

import dataclasses

import pytest
import torch
from draft_sample_cases import Batch, make_batch, make_cache

from specreg.draft_logits import CELL_EMPTY, CELL_STORED
from specreg.errors import ConfigError, TensorError
from specreg.kernels import draft_sample, gumbel_sample
from specreg.kernels.draft_sample import reference as draft_reference
from specreg.kernels.gumbel_sample import reference
from specreg.kernels.gumbel_sample.reference import gumbel_reference
from specreg.ownership import Shard

FIELDS = ("logits", "temperature", "logsumexp", "state")


def draw(batch, cache=None, vocab_size=None, **kwargs):
    vocab_size = batch.logits.shape[1] if vocab_size is None else vocab_size
    return gumbel_sample(*batch, cache, vocab_size=vocab_size, **kwargs)


def many_draws(q, num_draws, temperature=1.0):
    slots = torch.arange(num_draws)
    return Batch(
        logits=(q.log() * temperature).expand(num_draws, -1).contiguous(),
        idx_mapping=slots,
        steps=slots * 0,
        positions=slots * 0 + 17,
        temperature=torch.full((num_draws,), temperature),
        seeds=slots,
    )


# Law


def coarse_gumbel(words):
    """The broken variant: 23 of the 32 bits, and no series for small ones."""
    u = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def law(logits, noise):
    """Probability of each column when its word takes each of 2^18 evenly spaced values.

    The others win less often than a score wherever their own noise stays below it.
    """
    words = torch.arange(2**18) * 2**14 + 2**13
    noise = noise(words).double()
    scores = logits.double()[:, None] + noise
    ordered = noise.sort().values
    probabilities = []
    for i in range(len(logits)):
        wins = torch.ones_like(noise)
        for j in range(len(logits)):
            if j != i:
                room = scores[i] - logits[j]
                wins *= torch.searchsorted(ordered, room, right=j > i) / len(words)
        probabilities.append(float(wins.mean()))
    return torch.tensor(probabilities, dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_the_law_is_softmax_within_1e_4(scale):
    logits = torch.randn(8, generator=torch.Generator().manual_seed(1)) * scale
    drawn = law(logits, gumbel_reference)
    assert float((drawn - logits.double().softmax(-1)).abs().sum() / 2) < 1e-4


def flat_law_distance(num_columns, bits):
    """Total variation, from ties at the minimum alone, for equal logits on a grid of 2^-bits."""
    step = 2.0**-bits
    num_terms = min(2**bits, int(40 / (num_columns * step)) + 2)
    term = torch.arange(num_terms, dtype=torch.float64)
    below, above = torch.log1p(-term * step), torch.log1p(-(term + 1) * step)
    columns = torch.linspace(0, num_columns - 1, 65, dtype=torch.float64)
    p = torch.stack(
        [(step * (i * above + (num_columns - 1 - i) * below).exp()).sum() for i in columns]
    )
    return float((p * num_columns - 1).abs().mean() / 2)


def test_ties_at_the_minimum_are_rare_with_32_bits_and_not_with_23():
    """At 151,936 equal logits: 4.4e-6 and 2.3e-3 in total variation."""
    assert flat_law_distance(151_936, 32) < 1e-5
    assert flat_law_distance(151_936, 23) > 1e-3


def test_noise_is_finite_monotone_and_precise_at_both_ends():
    words = torch.tensor([0, 1, 2, 2**20, 2**26 - 1, 2**26, 2**31, 2**32 - 2**8, 2**32 - 1])
    noise = gumbel_reference(words)
    assert bool(noise.isfinite().all())
    assert bool((noise.diff() <= 0).all())
    exact = -torch.log(-torch.log1p(-(words[:7].double() + 0.5) * 2.0**-32))
    torch.testing.assert_close(noise[:7].double(), exact, rtol=3e-7, atol=3e-7)
    assert not bool(coarse_gumbel(words[:3]).diff().any())


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_draws_follow_the_draft_distribution_at_its_temperature(temperature):
    """Chi-square with 4 df, 20,000 draws, reject above 23.5.

    Noise that all columns share, the broken variant, gives the argmax and scores 13,000.
    """
    q = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04])
    batch = many_draws(q, 20_000, temperature)

    def score(tokens):
        counts = torch.bincount(tokens, minlength=5)
        return float(((counts - 20_000 * q) ** 2 / (20_000 * q)).sum())

    assert score(draw(batch)) < 23.5
    assert score(draw(batch, greedy=True)) > 1e4


def test_noise_belongs_to_a_target_id_whatever_its_column():
    target_ids = torch.randperm(900, generator=torch.Generator().manual_seed(3))[:300]
    batch = make_batch(list(range(30)), 300, scale=1)
    reduced = draw(batch, vocab_size=900, target_ids=target_ids)
    whole = torch.full((30, 900), -torch.inf)
    whole[:, target_ids] = batch.logits
    assert torch.equal(reduced, draw(batch._replace(logits=whole)))


def test_the_steps_of_the_noise_can_be_given_apart_from_those_of_the_cells():
    batch = make_batch([0, 1], 60, num_steps=2, scale=0)
    fixed = draw(batch, make_cache(2, 2, 60), noise_steps=torch.full_like(batch.steps, 5))
    other = batch._replace(steps=torch.full_like(batch.steps, 5))
    assert torch.equal(fixed, draw(other))
    with pytest.raises(TensorError, match=r"gumbel_sample\(noise_steps\)"):
        draw(batch, noise_steps=torch.zeros(3, dtype=torch.int64))


# The contract of draft_sample


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
@pytest.mark.parametrize("layout", ["dense", "scattered", "draft_vocab"])
def test_rows_are_stored_with_the_statistics_that_draft_sample_stores(layout, shard, cache_dtype):
    slots = [3, -1, 0, 2, 1]
    batch = make_batch(slots, 700, num_steps=2, temperature=[1, 0, 0.5, 2])
    vocab_size, target_ids = 700, None
    if layout != "dense":
        vocab_size, target_ids = 3000, torch.arange(0, 1400, 2)
    kwargs = {"target_ids": target_ids} if layout == "draft_vocab" else {}
    caches = [make_cache(4, 2, vocab_size, shard, cache_dtype, **kwargs) for _ in range(2)]
    draw(batch, caches[0], vocab_size, target_ids=target_ids)
    draft_sample(*batch, caches[1], vocab_size=vocab_size, target_ids=target_ids)
    for field in FIELDS:
        assert torch.equal(getattr(caches[0], field), getattr(caches[1], field))


def test_the_shards_can_be_given_beside_the_cache():
    batch = make_batch([3, 0, 2, 1], 40)
    view = make_cache(4, 1, 40, Shard(2, 0))
    given = make_cache(4, 1, 40, Shard(2, 1))
    draw(batch, view, logits_cache_shard_idx=1)
    draw(batch, given)
    for field in FIELDS:
        assert torch.equal(getattr(view, field), getattr(given, field))
    alone = make_cache(8, 1, 40, Shard(2, 1))
    whole = dataclasses.replace(make_cache(4, 1, 40), shard=Shard())
    draw(batch, alone, logits_cache_num_shards=1, logits_cache_shard_idx=0)
    draw(batch, whole)
    assert torch.equal(alone.logits, whole.logits)
    with pytest.raises(ConfigError, match="shard_idx=2"):
        draw(batch, view, logits_cache_shard_idx=2)


def test_temperature_zero_and_greedy_take_the_largest_logit_the_lowest_id_on_ties():
    batch = make_batch([0, 1, 2], 1500, temperature=[0.0, 0.0, 1.0])
    batch.logits[0, [1400, 700, 701]] = 50.0
    batch.logits[1] = -3.0
    assert draw(batch)[:2].tolist() == [700, 0]
    assert torch.equal(draw(batch, greedy=True), batch.logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.01, 1.0])
def test_no_column_of_probability_0_or_beyond_the_vocabulary_is_ever_drawn(temperature):
    vocab_size = 1025
    batch = make_batch([0], vocab_size + 63, temperature=temperature, scale=100)
    batch.logits[0, 1000:vocab_size] = -3.3e38
    batch.logits[0, :1000] = -torch.inf
    batch.logits[0, 7] = torch.nan
    batch.logits[0, vocab_size:] = 100.0
    for position in range(50):
        there = batch._replace(positions=torch.tensor([position]))
        assert 1000 <= int(draw(there, vocab_size=vocab_size)) < vocab_size


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_with_nothing_to_draw_gives_token_0_is_flagged_and_leaves_its_cell_empty(value):
    batch = make_batch([0, 1, 2], 700)
    batch.logits[1] = value
    cache, num_nans = make_cache(3, 1, 700), torch.zeros(3, dtype=torch.int32)
    ids = draw(batch, cache, num_nans=num_nans)
    assert int(ids[1]) == 0
    assert num_nans.tolist() == [0, 1, 0]
    assert cache.state[:, 0].tolist() == [CELL_STORED, CELL_EMPTY, CELL_STORED]


def test_tokens_do_not_depend_on_the_batch(monkeypatch):
    batch = make_batch([3, 0, -1, 2, 1], 900, num_steps=2)
    ids = draw(batch)
    for row in range(10):
        assert torch.equal(draw(batch.rows([row])), ids[[row]])
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1)
    assert torch.equal(draw(batch), ids)
    assert draft_reference.CHUNK_ELEMENTS > 1


def test_what_draft_sample_refuses_is_refused():
    batch = make_batch([0, 1], 8)
    with pytest.raises(TensorError, match=r"gumbel_sample\(logits\)"):
        draw(batch._replace(logits=torch.zeros(8)), vocab_size=8)
    with pytest.raises(TensorError, match="no distribution to store"):
        draw(batch, make_cache(2, 1, 8), greedy=True)
    assert draw(batch.rows([])).shape == (0,)
