"""`markov_sample` on the CPU against the loop it stands for, and the invariants of its cache."""

import functools
import math

import pytest
import torch
from draft_sample_cases import POISON, POISON_STATE, make_cache
from markov_sample_cases import loop, make_markov_batch, step_logits

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.errors import TensorError
from specreg.kernels import markov_sample
from specreg.kernels.markov_sample import reference
from specreg.kernels.markov_sample.reference import markov_bias_reference
from specreg.ownership import Shard, owner_of, shard_row

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CELL_FIELDS = ("logits", "temperature", "logsumexp", "state")
VOCAB_SIZE = 700
TEMPERATURE = [1.0, 0.0, 0.5, 2.0, 0.7, 1.0, 0.1]


def shards(*counts):
    return [Shard(num_shards, rank) for num_shards in counts for rank in range(num_shards)]


def assert_same_cells(first, second):
    for field in CELL_FIELDS:
        bits = (getattr(cache, field).contiguous().view(torch.uint8) for cache in (first, second))
        assert torch.equal(*bits), field


@pytest.mark.parametrize("rank", [1, 16, 100, 256])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_tokens_and_cells_are_those_of_the_loop_bit_for_bit(rank, dtype, shard):
    batch = make_markov_batch(
        [3, 0, 6, -1, 4], VOCAB_SIZE, rank=rank, dtype=dtype, temperature=TEMPERATURE
    )
    caches = [make_cache(7, 4, VOCAB_SIZE, shard, dtype, padding=3) for _ in range(2)]
    tokens = markov_sample(*batch, caches[0], vocab_size=VOCAB_SIZE)
    assert torch.equal(tokens, loop(batch, caches[1], vocab_size=VOCAB_SIZE))
    assert_same_cells(*caches)
    assert tokens[3].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_greedy_drafts_are_those_of_the_loop(dtype):
    batch = make_markov_batch([2, -1, 0], VOCAB_SIZE, dtype=dtype)
    options = {"vocab_size": VOCAB_SIZE, "greedy": True}
    tokens = markov_sample(*batch, None, **options)
    assert torch.equal(tokens, loop(batch, None, **options))
    first = step_logits(batch, 0, batch.anchors)
    assert torch.equal(tokens[[0, 2], 0], first[[0, 2]].float().argmax(-1))


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_reduced_vocabulary_feeds_target_ids_back(is_dense):
    """Ids of draft columns as the next step's previous tokens would find other rows of w1."""
    batch = make_markov_batch([1, 0, 2], 600, vocab_size=3000)
    target_ids = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:600]
    options = {"vocab_size": 3000, "target_ids": target_ids}
    make = functools.partial(make_cache, target_ids=None if is_dense else target_ids)
    caches = [make(3, 3, 3000, Shard(2, 0), BF16) for _ in range(2)]
    tokens = markov_sample(*batch, caches[0], **options)
    assert torch.equal(tokens, loop(batch, caches[1], **options))
    assert_same_cells(*caches)
    assert set(tokens.flatten().tolist()) <= set(target_ids.tolist())


def test_a_bias_is_capped_then_scaled_and_rounded_once_more():
    batch = make_markov_batch([0, 1], 300, dtype=BF16)
    plain = markov_bias_reference(batch.anchors, batch.w1, batch.w2, dtype=BF16)
    both = markov_bias_reference(
        batch.anchors, batch.w1, batch.w2, dtype=BF16, scale=0.5, soft_cap=2.0
    )
    assert torch.equal(both, (0.5 * 2.0 * torch.tanh(plain.float() / 2.0)).to(BF16))
    options = {"vocab_size": 300, "scale": 0.5, "soft_cap": 2.0}
    tokens = markov_sample(*batch, None, **options)
    assert torch.equal(tokens, loop(batch, None, **options))


def test_a_bias_depends_neither_on_the_batch_nor_on_how_the_table_is_cut(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    w1, w2 = (torch.randn(900, 256, generator=generator).to(BF16) for _ in range(2))
    previous = torch.arange(50)
    bias = markov_bias_reference(previous, w1, w2, dtype=BF16)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 7 * 256)
    for rows in ([7], [49, 0, 7], list(range(50))):
        assert torch.equal(markov_bias_reference(previous[rows], w1, w2, dtype=BF16), bias[rows])


@pytest.mark.parametrize("anchor", [-1, 700, 2**40])
def test_an_anchor_outside_the_table_adds_no_bias(anchor):
    batch = make_markov_batch([0], VOCAB_SIZE, temperature=0.0)
    batch = batch._replace(anchors=torch.tensor([anchor]))
    tokens = markov_sample(*batch, None, vocab_size=VOCAB_SIZE)
    assert int(tokens[0, 0]) == int(batch.base_logits[0, 0].argmax())


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_no_row_of_the_table_shows_in_the_bias_of_an_anchor_outside_it(odd):
    batch = make_markov_batch([0], VOCAB_SIZE)
    batch.w1.fill_(odd)
    previous = torch.tensor([-1, VOCAB_SIZE])
    bias = markov_bias_reference(previous, batch.w1, batch.w2, dtype=FP32)
    assert torch.equal(bias, torch.zeros(2, VOCAB_SIZE))


def test_an_infinite_bias_is_capped():
    w1, w2 = torch.tensor([[300.0]], dtype=FP16), torch.tensor([[300.0], [-300.0]], dtype=FP16)
    options = {"dtype": FP16, "scale": 0.5, "soft_cap": 4.0}
    bias = markov_bias_reference(torch.tensor([0]), w1, w2, **options)
    assert bias.tolist() == [[2.0, -2.0]]


def test_each_step_counts_what_is_no_number_and_a_row_without_logits_goes_on():
    batch = make_markov_batch([0, 1, 2], VOCAB_SIZE)
    batch.base_logits[0, 0, 5] = torch.nan
    batch.base_logits[0, 2, 5] = torch.nan
    batch.base_logits[1, 1] = -torch.inf
    counts, expected = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    cache = make_cache(3, 3, VOCAB_SIZE)
    tokens = markov_sample(*batch, cache, vocab_size=VOCAB_SIZE, num_nans=counts)
    assert torch.equal(tokens, loop(batch, None, vocab_size=VOCAB_SIZE, num_nans=expected))
    assert counts.tolist() == expected.tolist() == [2, 1, 0]
    assert tokens[1, 1] == 0
    assert cache.state.tolist() == [[1, 1, 1], [1, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize("shard", shards(1, 2, 3, 4), ids=str)
def test_i1_a_rank_stores_rows_it_owns_and_touches_no_other_byte(shard):
    slots = [3, 0, 6, -1, 4]
    batch = make_markov_batch(slots, VOCAB_SIZE, num_steps=2, temperature=TEMPERATURE, dtype=BF16)
    cache = make_cache(7 + 2 * shard.num_shards, 3, VOCAB_SIZE, shard, BF16, padding=3)
    markov_sample(*batch, cache, vocab_size=VOCAB_SIZE)
    written = {(shard.row(slot), step) for slot in slots if shard.owns(slot) for step in (0, 1)}
    for row in range(cache.num_rows):
        for step in range(3):
            cell = (cache.logits[row, step], cache.temperature[row, step])
            if (row, step) in written:
                assert cache.state[row, step] == 1
                assert not bool((cell[0] == POISON).all())
            else:
                assert cache.state[row, step] == POISON_STATE
                assert bool((cell[0] == POISON).all())
                assert float(cell[1]) == float(cache.logsumexp[row, step]) == POISON
    assert bool((cache.logits._base[..., VOCAB_SIZE:] == POISON).all())


@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
def test_i2_the_union_of_the_shards_equals_the_replicated_cache_bit_for_bit(num_shards):
    batch = make_markov_batch(list(range(7)), VOCAB_SIZE, temperature=TEMPERATURE, dtype=BF16)
    whole = make_cache(7, 3, VOCAB_SIZE, Shard(), BF16)
    tokens = markov_sample(*batch, whole, vocab_size=VOCAB_SIZE)
    parts = [make_cache(7, 3, VOCAB_SIZE, shard, BF16) for shard in shards(num_shards)]
    for part in parts:
        assert torch.equal(markov_sample(*batch, part, vocab_size=VOCAB_SIZE), tokens)
    for slot in range(7):
        part, row = parts[owner_of(slot, num_shards)], shard_row(slot, num_shards)
        for field in CELL_FIELDS:
            assert torch.equal(getattr(part, field)[row], getattr(whole, field)[slot])


@pytest.mark.parametrize("shard", shards(1, 2, 3), ids=str)
def test_i4_a_padding_row_is_inert(shard):
    """Padding has NaN logits and no anchor; the slots that -1 would alias keep their cells."""
    batch = make_markov_batch([2, -1, 4, -1], VOCAB_SIZE, max_num_seqs=7)
    batch.base_logits[[1, 3]] = torch.nan
    batch.anchors[[1, 3]] = 2**40
    cache, alone = (make_cache(7, 3, VOCAB_SIZE, shard) for _ in range(2))
    num_nans = torch.zeros(7, dtype=torch.int32)
    tokens = markov_sample(*batch, cache, vocab_size=VOCAB_SIZE, num_nans=num_nans)
    assert tokens[[1, 3]].tolist() == [[-1] * 3] * 2
    assert num_nans.tolist() == [0] * 7
    few = markov_sample(*batch.rows([0, 2]), alone, vocab_size=VOCAB_SIZE)
    assert torch.equal(few, tokens[[0, 2]])
    assert_same_cells(cache, alone)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_i7_tokens_depend_on_neither_batch_nor_slot_nor_owner(dtype):
    batch = make_markov_batch(
        list(range(9)), VOCAB_SIZE, dtype=dtype, temperature=[*TEMPERATURE, 1.3, 0.9]
    )
    tokens = markov_sample(*batch, None, vocab_size=VOCAB_SIZE)
    for slots, order, shard in (
        ([8, 7, 6, 5, 4, 3, 2, 1, 0], [7, 2, 5, 0, 8, 1, 3, 6, 4], Shard()),
        ([3, 1, 4, 0, 5, 9, 2, 6, 11], [4, 1], Shard(2, 1)),
        ([7, 0, 3, 11, 6, 1, 2, 4, 5], [6], Shard(4, 2)),
    ):
        temperature, seeds = torch.full((12,), math.nan), torch.zeros(12, dtype=torch.int64)
        temperature[slots], seeds[slots] = batch.temperature, batch.seeds
        moved = batch.rows(order)._replace(
            idx_mapping=torch.tensor(slots)[order], temperature=temperature, seeds=seeds
        )
        cache = make_cache(12, 3, VOCAB_SIZE, shard, dtype)
        assert torch.equal(markov_sample(*moved, cache, vocab_size=VOCAB_SIZE), tokens[order])


def test_an_empty_batch_has_no_tokens():
    batch = make_markov_batch([0], 16).rows([])
    assert markov_sample(*batch, None, vocab_size=16).shape == (0, 3)


def test_a_cache_of_candidates_is_refused():
    batch = make_markov_batch([0, 1], VOCAB_SIZE)
    cache = DraftLogitsCache(
        torch.zeros(2, 3, 8), Shard(), DraftLogitsLayout.TOP_K, VOCAB_SIZE, num_candidates=8
    ).view()
    with pytest.raises(TensorError, match=r"(?s)markov_sample\(cache\).*layout top_k.*dense"):
        markov_sample(*batch, cache, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_logits": torch.zeros(2, 700)}, r"(?s)base_logits\).*\[any, any, any\]"),
        ({"base_logits": torch.zeros(2, 0, 700)}, "no step to draft"),
        ({"base_logits": torch.zeros(2, 700, 3).mT}, "stride 1 between columns"),
        ({"anchors": torch.zeros(2, dtype=torch.int32)}, r"markov_sample\(anchors\)"),
        ({"anchors": torch.zeros(3, dtype=torch.int64)}, r"markov_sample\(anchors\)"),
        ({"idx_mapping": torch.zeros(3, dtype=torch.int64)}, r"markov_sample\(idx_mapping\)"),
        ({"positions": torch.zeros(2)}, r"markov_sample\(positions\)"),
        ({"w1": torch.zeros(700, 16, dtype=torch.int8)}, r"markov_sample\(w1\)"),
        ({"w1": torch.zeros(699, 16)}, "do not cover the vocabulary"),
        ({"w1": torch.zeros(16, 700).T}, "stride 1 between columns"),
        ({"w2": torch.zeros(699, 16)}, "do not cover the vocabulary"),
        ({"w2": torch.zeros(700, 8)}, r"(?s)markov_sample\(w2\).*\[any, 16\]"),
        ({"w2": torch.zeros(700, 16, dtype=BF16)}, r"(?s)markov_sample\(w2\).*float32"),
        ({"w1": torch.zeros(700, 0), "w2": torch.zeros(700, 0)}, "rank 1 or more"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    batch = make_markov_batch([0, 1], VOCAB_SIZE)._replace(**change)
    with pytest.raises(TensorError, match=message):
        markov_sample(*batch, None, vocab_size=VOCAB_SIZE)


def test_a_cache_with_fewer_steps_and_greedy_drafts_with_one_are_refused():
    batch = make_markov_batch([0, 1], VOCAB_SIZE)
    with pytest.raises(TensorError, match="2 steps for 3; allowed: at least as many"):
        markov_sample(*batch, make_cache(2, 2, VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    with pytest.raises(TensorError, match="greedy drafts have no distribution to store"):
        markov_sample(*batch, make_cache(2, 3, VOCAB_SIZE), vocab_size=VOCAB_SIZE, greedy=True)
