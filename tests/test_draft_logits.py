"""The draft-logits cache: what it allocates, and what marks a cell as holding anything."""

from types import SimpleNamespace

import pytest
import torch

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import CELL_EMPTY, CELL_STORED, DraftLogitsCache, DraftLogitsView
from specreg.errors import InternalError, TensorError
from specreg.memory import draft_logits_size
from specreg.ownership import Shard, rows_per_rank


def plan_for(max_num_seqs, num_shards=1, shard_idx=0, *, vocab_size=11, dtype="bfloat16", **kwargs):
    """The attributes of a `DraftLogitsPlan` that a cache reads."""
    size = draft_logits_size(
        DraftLogitsLayout.DENSE,
        rows=rows_per_rank(max_num_seqs, num_shards),
        num_speculative_tokens=3,
        vocab_size=vocab_size,
        dtype=dtype,
    )
    plan = {
        "has_cache": True,
        "layout": DraftLogitsLayout.DENSE,
        "shape": size.shape,
        "dtype": dtype,
        "num_shards": num_shards,
        "shard_idx": shard_idx,
        "vocab_size": vocab_size,
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


def test_a_layout_that_cannot_be_allocated_is_refused():
    with pytest.raises(InternalError, match=r"top_k[^$]*draft_logits_layout to dense"):
        DraftLogitsCache.allocate(plan_for(4, layout=DraftLogitsLayout.TOP_K), "cpu")


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


def test_beginning_with_another_dtype_is_refused():
    with pytest.raises(TensorError, match=r"int32[^$]*pass idx_mapping.to"):
        filled(4).begin(torch.tensor([0], dtype=torch.int32))
