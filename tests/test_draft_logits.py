"""The draft-logits cache: what it allocates, and what marks a cell as holding anything."""

from types import SimpleNamespace

import pytest
import torch

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import (
    CELL_BARE,
    CELL_EMPTY,
    CELL_STORED,
    DraftLogitsCache,
    DraftLogitsView,
)
from specreg.errors import TensorError
from specreg.memory import draft_logits_size
from specreg.ownership import Shard, rows_per_rank

DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout


def plan_for(
    max_num_seqs,
    num_shards=1,
    shard_idx=0,
    *,
    layout=DENSE,
    vocab_size=11,
    dtype="bfloat16",
    draft_vocab_size=None,
    num_candidates=None,
    **kwargs,
):
    """The attributes of a `DraftLogitsPlan` that a cache reads."""
    size = draft_logits_size(
        layout,
        rows=rows_per_rank(max_num_seqs, num_shards),
        num_speculative_tokens=3,
        vocab_size=vocab_size,
        dtype=dtype,
        draft_vocab_size=draft_vocab_size,
        num_candidates=num_candidates,
    )
    plan = {
        "has_cache": True,
        "layout": layout,
        "shape": size.shape,
        "dtype": size.dtype,
        "num_shards": num_shards,
        "shard_idx": shard_idx,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "num_candidates": num_candidates,
        "bytes_per_rank": size.logits_bytes,
        "side_bytes_per_rank": size.side_bytes,
    }
    return SimpleNamespace(**(plan | kwargs))


def filled(max_num_seqs, num_shards=1, shard_idx=0):
    cache = DraftLogitsCache.allocate(plan_for(max_num_seqs, num_shards, shard_idx), "cpu")
    cache.state.fill_(CELL_STORED)
    return cache


@pytest.mark.parametrize("max_num_seqs", [1, 3, 6, 256])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_a_rank_allocates_exactly_the_bytes_of_its_plan(max_num_seqs, num_shards, dtype, itemsize):
    plan = plan_for(max_num_seqs, num_shards, num_shards - 1, dtype=dtype)
    cache = DraftLogitsCache.allocate(plan, "cpu")
    assert cache.nbytes == plan.bytes_per_rank
    assert cache.nbytes == -(-max_num_seqs // num_shards) * 3 * 11 * itemsize
    assert cache.side_nbytes == plan.side_bytes_per_rank
    assert cache.shard == Shard(num_shards, num_shards - 1)
    assert cache.num_shards == num_shards


def test_a_plan_without_a_cache_allocates_nothing():
    assert DraftLogitsCache.allocate(plan_for(4, has_cache=False), "cpu") is None


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "draft_vocab_size", "num_candidates"),
    [(DENSE, 4, None), (DRAFT_VOCAB, 4, None), (DENSE, None, 5), (TOP_K, None, 5), (TOP_K, 4, 2)],
)
def test_every_layout_takes_exactly_the_bytes_of_its_plan(
    layout, draft_vocab_size, num_candidates, num_shards
):
    plan = plan_for(
        6,
        num_shards,
        num_shards - 1,
        layout=layout,
        draft_vocab_size=draft_vocab_size,
        num_candidates=num_candidates,
    )
    target_ids = None if num_candidates else torch.tensor([1, 3, 4, 6])
    cache = DraftLogitsCache.allocate(plan, "cpu", target_ids)
    assert (cache.nbytes, cache.side_nbytes) == (plan.bytes_per_rank, plan.side_bytes_per_rank)
    assert (tuple(cache.logits.shape), cache.layout) == (plan.shape, layout)
    # Scores of candidates are fp32 in every layout, or tokens would depend on it.
    assert cache.logits.dtype == (torch.float32 if num_candidates else torch.bfloat16)


@pytest.mark.parametrize("layout", [DENSE, TOP_K])
def test_a_cache_of_candidates_starts_without_any(layout):
    cache = DraftLogitsCache.allocate(plan_for(4, layout=layout, num_candidates=5), "cpu")
    assert bool((cache.view().ids == -1).all())
    assert bool((cache.logits == -torch.inf).all())
    assert cache.ids.dtype == torch.int32


def test_a_reduced_vocabulary_has_a_table_back_from_target_ids():
    """Offsets [1, 2, 2, 3] name the target ids 1, 3, 4 and 6."""
    target_ids = torch.arange(4) + torch.tensor([1, 2, 2, 3])
    plan = plan_for(4, layout=DRAFT_VOCAB, draft_vocab_size=4, vocab_size=8)
    cache = DraftLogitsCache.allocate(plan, "cpu", target_ids)
    assert cache.view().target_to_draft.tolist() == [-1, 0, -1, 1, 2, -1, 3, -1]
    assert cache.target_ids.tolist() == [1, 3, 4, 6]
    dense = plan_for(4, draft_vocab_size=4, vocab_size=8)
    assert DraftLogitsCache.allocate(dense, "cpu", target_ids).view().target_to_draft is None


def test_an_identity_over_the_whole_vocabulary_is_no_map():
    identity = torch.arange(11, dtype=torch.int32)
    for plan in (plan_for(4), plan_for(4, draft_vocab_size=11)):
        assert DraftLogitsCache.allocate(plan, "cpu", identity).target_ids is None
        permuted = DraftLogitsCache.allocate(plan, "cpu", identity.flip(0))
        assert permuted.target_ids.tolist() == list(range(10, -1, -1))


@pytest.mark.parametrize(
    ("target_ids", "match"),
    [
        (None, r"no map[^$]*None for 4 draft columns[^$]*cannot be guessed"),
        ([1, 3, 4], r"another length[^$]*\[3\]; allowed: \[4\]"),
        ([1, 3, 3, 8], r"2 ids[^$]*such as \[3, 8\]; allowed: distinct ids below 8"),
        ([-1, 0, 2, 3], r"such as \[-1\]"),
        ([[1, 3, 4, 6]], "another length"),
    ],
)
@pytest.mark.parametrize("layout", [DENSE, DRAFT_VOCAB])
def test_a_map_that_is_missing_or_does_not_fit_is_an_error_at_load(target_ids, match, layout):
    plan = plan_for(4, layout=layout, draft_vocab_size=4, vocab_size=8)
    target_ids = None if target_ids is None else torch.tensor(target_ids)
    with pytest.raises(TensorError, match=match):
        DraftLogitsCache.allocate(plan, "cpu", target_ids)


def test_more_draft_columns_than_the_target_has_are_an_error_at_load():
    with pytest.raises(TensorError, match=r"such as \[8\]"):
        DraftLogitsCache.allocate(
            plan_for(4, draft_vocab_size=9, vocab_size=8), "cpu", torch.arange(9)
        )


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 0), Shard(2, 1), Shard(3, 2)], ids=str)
def test_bare_cells_get_a_temperature_and_touch_no_other(shard):
    cache = filled(6, shard.num_shards, shard.shard_idx)
    cache.temperature.fill_(7.25)
    slots, steps = torch.tensor([4, -1, 1, 4]), torch.tensor([0, 1, 2, 2])
    temperature = torch.tensor([9.0, 0.0, 9.0, 9.0, 0.5, 9.0])
    cache.mark_bare(slots, steps, temperature)
    marked = {
        (shard.row(slot), step)
        for slot, step in zip(slots.tolist(), steps.tolist(), strict=True)
        if shard.owns(slot)
    }
    assert {tuple(cell) for cell in (cache.state == CELL_BARE).nonzero().tolist()} == marked
    for row, step in marked:
        slot = row * shard.num_shards + shard.shard_idx
        assert float(cache.temperature[row, step]) == float(temperature[slot])
    assert int((cache.temperature == 7.25).sum()) == cache.state.numel() - len(marked)


def test_a_new_cache_holds_nothing():
    cache = DraftLogitsCache.allocate(plan_for(4), "cpu")
    assert bool((cache.state == CELL_EMPTY).all())


def test_a_view_aliases_the_cache():
    cache = DraftLogitsCache.allocate(plan_for(4, 2, 1), "cpu")
    view = cache.view()
    assert isinstance(view, DraftLogitsView)
    for field in ("logits", "temperature", "logsumexp", "state"):
        assert getattr(view, field).data_ptr() == getattr(cache, field).data_ptr()
    assert (view.num_rows, view.num_speculative_tokens, view.vocab_size) == (2, 3, 11)
    assert view.shard == Shard(2, 1)


@pytest.mark.parametrize(
    ("num_shards", "shard_idx", "emptied"),
    [(1, 0, [1, 4]), (2, 0, [2]), (2, 1, [0]), (3, 1, [0, 1]), (3, 2, [])],
)
def test_beginning_a_proposal_empties_the_owned_cells_of_its_requests(
    num_shards, shard_idx, emptied
):
    cache = filled(6, num_shards, shard_idx)
    cache.begin(torch.tensor([4, -1, 1, -1]))
    assert (cache.state == CELL_EMPTY).all(-1).nonzero().flatten().tolist() == emptied


def test_a_released_slot_shows_nothing_and_foreign_slots_are_ignored():
    cache = filled(6, 2, 1)
    cache.release(3)
    cache.release(2)
    cache.release(-1)
    assert cache.state[:, 0].tolist() == [CELL_STORED, CELL_EMPTY, CELL_STORED]


def test_an_index_map_of_another_dtype_is_refused():
    slots = torch.tensor([0], dtype=torch.int32)
    with pytest.raises(TensorError, match=r"begin\(idx_mapping\)[^$]*int32[^$]*idx_mapping.to"):
        filled(4).begin(slots)
    with pytest.raises(TensorError, match=r"mark_bare\(idx_mapping\)"):
        filled(4).mark_bare(slots, slots, torch.ones(4))
