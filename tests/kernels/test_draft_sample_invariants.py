"""The invariants of the draft-logits cache, every rank played in turn in one process."""

import math

import pytest
import torch
from draft_sample_cases import POISON, POISON_STATE, make_batch, make_cache

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.kernels import draft_sample, rejection_sample
from specreg.ownership import Shard, owner_of, shard_row

CELL_FIELDS = ("logits", "temperature", "logsumexp", "state")
VOCAB_SIZE = 700
TEMPERATURE = [1.0, 0.0, 0.5, 2.0, 0.7, 1.0, 0.1]


def shards(*counts):
    return [Shard(num_shards, rank) for num_shards in counts for rank in range(num_shards)]


def draw(batch, cache, **kwargs):
    return draft_sample(*batch, cache, vocab_size=VOCAB_SIZE, **kwargs)


def cell_bytes(cache, field, row, step):
    return getattr(cache, field)[row, step].reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("shard", shards(1, 2, 3, 4), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_i1_a_rank_stores_rows_it_owns_and_touches_no_other_byte(shard, dtype):
    slots = [3, 0, 6, -1, 4]
    batch = make_batch(slots, VOCAB_SIZE, num_steps=2, temperature=TEMPERATURE)
    cache = make_cache(7 + 2 * shard.num_shards, 3, VOCAB_SIZE, shard, dtype, padding=3)
    draw(batch, cache)

    written = {(shard.row(slot), step) for slot in slots if shard.owns(slot) for step in (0, 1)}
    for row in range(cache.num_rows):
        for step in range(3):
            cell = (cache.logits[row, step], cache.temperature[row, step])
            if (row, step) in written:
                assert cache.state[row, step] == 1
                assert not bool((cell[0] == POISON).any())
            else:
                assert cache.state[row, step] == POISON_STATE
                assert bool((cell[0] == POISON).all())
                assert float(cell[1]) == float(cache.logsumexp[row, step]) == POISON
    assert bool((cache.logits._base[..., VOCAB_SIZE:] == POISON).all())


@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_i2_the_union_of_the_shards_equals_the_replicated_cache_bit_for_bit(num_shards, dtype):
    batch = make_batch(list(range(7)), VOCAB_SIZE, num_steps=3, temperature=TEMPERATURE)
    whole = make_cache(7, 3, VOCAB_SIZE, Shard(), dtype)
    ids = draw(batch, whole)
    parts = [make_cache(7, 3, VOCAB_SIZE, shard, dtype) for shard in shards(num_shards)]
    for part in parts:
        assert torch.equal(draw(batch, part), ids)
    for slot in range(7):
        part, row = parts[owner_of(slot, num_shards)], shard_row(slot, num_shards)
        for field in CELL_FIELDS:
            for step in range(3):
                expected = cell_bytes(whole, field, slot, step)
                assert torch.equal(cell_bytes(part, field, row, step), expected)


@pytest.mark.parametrize("shard", shards(1, 2, 3), ids=str)
def test_i4_a_padding_row_is_inert(shard):
    """Padding is drafted with NaN logits; the slots that -1 would alias keep their cells."""
    batch = make_batch([2, -1, 4, -1], VOCAB_SIZE, max_num_seqs=7)
    batch.logits[[1, 3]] = torch.nan
    cache = make_cache(7, 1, VOCAB_SIZE, shard)
    num_nans = torch.zeros(7, dtype=torch.int32)
    ids = draw(batch, cache, num_nans=num_nans)
    assert ids[[1, 3]].tolist() == [-1, -1]
    assert num_nans.tolist() == [0] * 7

    alone = make_cache(7, 1, VOCAB_SIZE, shard)
    assert torch.equal(draw(batch.rows([0, 2]), alone), ids[[0, 2]])
    for field in CELL_FIELDS:
        assert torch.equal(getattr(cache, field), getattr(alone, field))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_i4_a_batch_padded_to_a_captured_size_writes_only_its_own_cells(num_shards):
    """Five requests padded to eight, in a cache full of what a batch of eight left there."""
    batch = make_batch([3, 0, 6, 1, 4, -1, -1, -1], VOCAB_SIZE, max_num_seqs=8)
    for shard in shards(num_shards):
        cache = make_cache(8, 2, VOCAB_SIZE, shard)
        draw(batch, cache)
        stored = {(row, step) for row, step in (cache.state == 1).nonzero().tolist()}
        assert stored == {(shard.row(slot), 0) for slot in (3, 0, 6, 1, 4) if shard.owns(slot)}
        untouched = (cache.state == POISON_STATE)[..., None].expand_as(cache.logits)
        assert bool((cache.logits[untouched] == POISON).all())


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_i5_a_cache_of_more_than_2_31_elements_works(shard):
    """Of the cache, two cells are touched: the last row, and where 32-bit offsets would put it."""
    vocab_size = 151_936
    rows = 2**31 // vocab_size + 8
    slot = (rows - 1) * shard.num_shards + shard.shard_idx
    small = make_cache(1, 1, vocab_size, Shard())
    large = DraftLogitsCache(
        torch.empty(rows, 1, vocab_size, dtype=torch.bfloat16),
        shard,
        DraftLogitsLayout.DENSE,
        vocab_size,
    )
    flat = large.logits.view(-1)
    assert flat.numel() > 2**31
    wrapped = flat[(rows - 1) * vocab_size - 2**31 :][:vocab_size]
    wrapped.fill_(POISON)

    batch = make_batch([0], vocab_size, dtype=torch.bfloat16)
    ids = draft_sample(*batch, small, vocab_size=vocab_size)
    high = batch._replace(
        idx_mapping=torch.tensor([slot]),
        temperature=torch.ones(slot + 1),
        seeds=batch.seeds.expand(slot + 1).contiguous(),
    )
    assert torch.equal(draft_sample(*high, large.view(), vocab_size=vocab_size), ids)
    assert torch.equal(large.logits[rows - 1, 0].float(), small.logits[0, 0])
    assert large.logsumexp[rows - 1, 0] == small.logsumexp[0, 0]
    assert bool((wrapped == POISON).all())


@pytest.mark.parametrize("shard", shards(1, 2), ids=str)
def test_i6_a_slot_given_to_a_new_request_shows_nothing_of_the_old_one(shard):
    cache = DraftLogitsCache(
        torch.empty(-(-4 // shard.num_shards), 2, VOCAB_SIZE),
        shard,
        DraftLogitsLayout.DENSE,
        VOCAB_SIZE,
    )
    draw(make_batch([0, 1, 2, 3], VOCAB_SIZE, num_steps=2), cache.view())
    owned = [slot for slot in range(4) if shard.owns(slot)]
    assert bool((cache.state[[shard.row(slot) for slot in owned]] == 1).all())

    cache.release(2)
    cache.begin(torch.tensor([-1, 3, -1]))
    for slot in owned:
        kept = 1 if slot in (0, 1) else 0
        assert cache.state[shard.row(slot)].tolist() == [kept, kept]

    draw(make_batch([3], VOCAB_SIZE, max_num_seqs=4), cache.view())
    if shard.owns(3):
        assert cache.state[shard.row(3)].tolist() == [1, 0]


@pytest.mark.parametrize("release", [True, False])
def test_i6_verification_takes_no_draft_on_the_word_of_a_stale_cell(release):
    """The stale cell would force acceptance; instead the request decodes as if it had no draft."""
    cache = DraftLogitsCache(
        torch.zeros(2, 1, VOCAB_SIZE), Shard(), DraftLogitsLayout.DENSE, VOCAB_SIZE
    )
    batch = make_batch([0, 1], VOCAB_SIZE)
    draw(batch, cache.view())

    def verify(draft):
        return rejection_sample(
            torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)),
            torch.tensor([[draft]]),
            torch.tensor([1]),
            torch.tensor([0, 2]),
            torch.tensor([40]),
            batch.temperature,
            batch.seeds,
            cache.view(),
            vocab_size=VOCAB_SIZE,
        )

    drafts = range(0, VOCAB_SIZE, 50)
    cache.logits[1, 0] = -50.0  # q is almost 0 ...
    cache.logits[1, 0, VOCAB_SIZE - 1] = 0.0  # ... for all drafts here, so p / q is large
    cache.logsumexp[1, 0] = 0.0
    assert all(int(verify(draft).num_sampled[0]) == 2 for draft in drafts)
    if release:
        cache.release(1)
    else:
        cache.begin(torch.tensor([1]))
    without = verify(-1)
    assert int(without.num_sampled[0]) == 1
    for draft in drafts:
        assert torch.equal(verify(draft).sampled, without.sampled)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [700, 49_152])
def test_i7_tokens_depend_on_nothing_but_logits_parameters_seed_position_and_step(
    vocab_size, num_threads
):
    """A row alone, and among eight others in another order, slot, row and owner: the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        batch = make_batch(list(range(9)), vocab_size, temperature=[*TEMPERATURE, 1.3, 0.9])
        results = []
        for slots, order, shard in (
            ([8, 7, 6, 5, 4, 3, 2, 1, 0], [7, 2, 5, 0, 8, 1, 3, 6, 4], Shard()),
            ([3, 1, 4, 0, 5, 9, 2, 6, 11], [0, 1, 2, 3, 4, 5, 6, 7, 8], Shard(2, 1)),
            ([7, 0, 3, 11, 6, 1, 2, 4, 5], [8, 7, 6, 5, 4, 3, 2, 1, 0], Shard(4, 2)),
        ):
            results.append(moved(batch, slots, order, shard, vocab_size))
        for row in range(9):
            alone = batch.rows([row])
            cache = make_cache(9, 1, vocab_size)
            token = draft_sample(*alone, cache, vocab_size=vocab_size)
            for ids, statistics in results:
                assert int(ids[row]) == int(token)
                assert statistics[row] in (None, float(cache.logsumexp[row, 0]))
    finally:
        torch.set_num_threads(before)


def moved(batch, slots, order, shard, vocab_size):
    """Ids and owned statistics of each original row, when request i has slot `slots[i]`."""
    temperature, seeds = torch.full((12,), math.nan), torch.zeros(12, dtype=torch.int64)
    temperature[slots], seeds[slots] = batch.temperature, batch.seeds
    there = batch.rows(order)._replace(
        idx_mapping=torch.tensor(slots)[order], temperature=temperature, seeds=seeds
    )
    cache = make_cache(12, 1, vocab_size, shard)
    drawn = draft_sample(*there, cache, vocab_size=vocab_size)
    ids = torch.empty_like(drawn)
    ids[order] = drawn
    statistics = [
        float(cache.logsumexp[shard.row(slot), 0]) if shard.owns(slot) else None for slot in slots
    ]
    return ids, statistics
