"""Cells stored bare: their statistics, computed before verification, on the torch twin."""

from dataclasses import replace

import pytest
import torch
from cache_layouts import batch_of_candidates, in_layout
from verification_cases import lay_out, random_requests

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels import cell_statistics, rejection_sample
from specreg.kernels.cell_statistics import reference
from specreg.kernels.common.view import CELL_BARE, CELL_EMPTY, CELL_STORED
from specreg.ownership import Shard

VOCAB_SIZE = 1100
INF = float("inf")


def bare(view, cells=...):
    """The cache as a bare writer leaves it: no statistics but the temperature."""
    logsumexp, state = view.logsumexp.clone(), view.state.clone()
    logsumexp[cells], state[cells] = float("nan"), CELL_BARE
    return replace(view, logsumexp=logsumexp, state=state, temperature=view.temperature.clone())


def stored_batch(dtype=torch.float32, shard=Shard(2, 1)):  # noqa: B008 - frozen
    slots = [9, 1, 5, 3, 7, 11]
    requests = random_requests(6, VOCAB_SIZE, dtype=dtype)
    return lay_out(requests, slots, shard=shard, max_num_seqs=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_of_dense_cells_are_those_that_drafting_stores_bit_for_bit(dtype):
    batch = stored_batch(dtype)
    view = bare(batch.cache)
    cell_statistics(view, batch.idx_mapping)
    is_drawn = batch.cache.temperature > 0
    assert torch.equal(view.logsumexp[is_drawn], batch.cache.logsumexp[is_drawn])
    assert torch.equal(view.temperature, batch.cache.temperature)
    assert torch.equal(view.state, batch.cache.state)


@pytest.mark.parametrize("layout", list(DraftLogitsLayout))
@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_bare_writer_gives_the_same_tokens_in_every_layout(layout, method):
    requests = random_requests(20, VOCAB_SIZE, closeness=0.3)
    batch, columns = batch_of_candidates(requests, list(range(20)))
    view = in_layout(batch.cache, columns, layout)
    expected = rejection_sample(*batch._replace(cache=view), vocab_size=VOCAB_SIZE, method=method)
    found = bare(view)
    cell_statistics(found, batch.idx_mapping)
    assert torch.allclose(found.logsumexp, view.logsumexp, atol=1e-6)
    got = rejection_sample(*batch._replace(cache=found), vocab_size=VOCAB_SIZE, method=method)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert len(set(got.num_sampled.tolist())) > 1


def test_other_cells_padding_rows_and_requests_of_other_ranks_are_not_touched():
    batch = stored_batch()
    view = bare(batch.cache)
    cell_statistics(view, torch.tensor([-1, 5, 4, 8]))  # 4 and 8 are another rank's
    row = 5 // 2
    others = [r for r in range(6) if r != row]
    assert view.state[others].eq(CELL_BARE).all()
    assert view.state[row].eq(CELL_STORED).all()
    assert view.logsumexp[others].isnan().all()
    state, logsumexp = view.state.clone(), view.logsumexp.clone()
    state[row, 1] = CELL_EMPTY
    view = replace(view, state=state)
    cell_statistics(view, torch.tensor([5]))  # nothing is bare in it any more
    assert state[row].tolist() == [CELL_STORED, CELL_EMPTY, CELL_STORED]
    assert torch.equal(view.logsumexp[row], logsumexp[row])


def test_cells_of_one_step_alone_may_be_bare():
    batch = stored_batch()
    view = bare(batch.cache, cells=(slice(None), 1))
    cell_statistics(view, batch.idx_mapping)
    is_drawn = batch.cache.temperature > 0
    assert torch.equal(view.logsumexp[is_drawn], batch.cache.logsumexp[is_drawn])


def test_a_cell_without_a_logit_becomes_empty_and_infinite_logits_share_the_mass():
    batch = stored_batch()
    logits = batch.cache.logits.clone()
    logits[0, 0], logits[0, 1], logits[0, 2] = -INF, float("nan"), 0.0
    logits[0, 2, :4] = INF
    temperature = torch.ones_like(batch.cache.temperature)
    view = replace(bare(batch.cache), logits=logits, temperature=temperature)
    cell_statistics(view, batch.idx_mapping)
    assert view.state[0].tolist() == [CELL_EMPTY, CELL_EMPTY, CELL_STORED]
    assert view.logsumexp[0].tolist() == [0.0, 0.0, 2.0**100]


def test_a_greedy_cell_is_stored_without_a_logsumexp():
    batch = stored_batch()
    view = bare(batch.cache)
    view.temperature.zero_()
    cell_statistics(view, batch.idx_mapping)
    assert view.state.eq(CELL_STORED).all()
    assert view.logsumexp.eq(0.0).all()


def test_absent_candidates_have_no_mass():
    requests = random_requests(2, VOCAB_SIZE)
    batch, columns = batch_of_candidates(requests, [0, 1])
    view = bare(in_layout(batch.cache, columns, DraftLogitsLayout.TOP_K))
    assert (view.logits[..., 0] == 50).all()  # beside id -1
    cell_statistics(view, batch.idx_mapping)
    expected = (view.logits[..., 1:] / view.temperature[..., None]).logsumexp(-1)
    assert torch.allclose(view.logsumexp, expected, atol=1e-5)


def test_chunks_of_any_size_give_equal_results(monkeypatch):
    batch = stored_batch()
    whole = bare(batch.cache)
    cell_statistics(whole, batch.idx_mapping)
    for cells in (1, 5):
        monkeypatch.setattr(reference, "CHUNK_ELEMENTS", cells * VOCAB_SIZE)
        part = bare(batch.cache)
        cell_statistics(part, batch.idx_mapping)
        assert torch.equal(part.logsumexp, whole.logsumexp)


def test_an_empty_batch_does_nothing():
    batch = stored_batch()
    view = bare(batch.cache)
    cell_statistics(view, batch.idx_mapping[:0])
    assert view.state.eq(CELL_BARE).all()


@pytest.mark.parametrize(
    ("idx_mapping", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), "idx_mapping"),
        (torch.zeros(4, dtype=torch.int64)[::2], "contiguous"),
        (torch.tensor([12]), "has no row"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(idx_mapping, message):
    with pytest.raises(TensorError, match=message):
        cell_statistics(stored_batch().cache, idx_mapping)


def test_a_cache_of_another_kind_is_refused():
    view = stored_batch().cache
    broken = replace(view, layout=DraftLogitsLayout.TOP_K)
    with pytest.raises(TensorError, match=r"cell_statistics\(cache\)"):
        cell_statistics(broken, torch.tensor([1]))
