"""`cache_candidates` on the CPU: what it draws, what it keeps of each layout, what it refuses."""

import dataclasses

import pytest
import torch
from candidates_cases import DENSE, TOP_K, Candidates, by_dense_loop, make_cache, make_candidates

from specreg.draft_logits import CELL_EMPTY, CELL_STORED
from specreg.errors import TensorError
from specreg.kernels import cache_candidates
from specreg.ownership import Shard

LAYOUTS = pytest.mark.parametrize("layout", [DENSE, TOP_K])
NAN, INF = float("nan"), float("inf")


def draw(batch, cache=None, vocab_size=257, **kwargs):
    view = None if cache is None else cache.view()
    return cache_candidates(*batch, view, vocab_size=vocab_size, **kwargs)


def cells(cache):
    """A cache's distributions as dense rows, whatever its layout."""
    if cache.layout is DENSE:
        return cache.logits.clone()
    rows = torch.full((*cache.logits.shape[:2], cache.vocab_size + 1), -INF)
    ids = torch.where(cache.ids < 0, cache.vocab_size, cache.ids).long()
    return rows.scatter(2, ids, cache.logits)[..., :-1]


@pytest.mark.parametrize("num_candidates", [1, 4, 16, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_tokens_are_those_of_a_loop_over_dense_rows(num_candidates, temperature):
    batch = make_candidates(list(range(40)), num_candidates, temperature=temperature)
    tokens = draw(batch)
    assert tokens.tolist() == by_dense_loop(batch)
    assert bool((batch.ids == tokens[:, None]).any(-1).all())


@pytest.mark.parametrize("num_candidates", [1, 4, 16, 64])
def test_tokens_and_statistics_do_not_depend_on_the_layout_or_the_shards(num_candidates):
    batch = make_candidates(
        [4, 0, -1, 2, 1], num_candidates, num_steps=3, temperature=[0, 0.5, 1, 1, 2]
    )
    whole = make_cache(TOP_K, 5, 3, num_candidates)
    tokens = draw(batch, whole)
    assert tokens.tolist() == by_dense_loop(batch)
    for layout in (DENSE, TOP_K):
        for shard in (Shard(), Shard(2, 0), Shard(2, 1), Shard(3, 2)):
            cache = make_cache(layout, 5, 3, num_candidates, shard=shard)
            assert torch.equal(draw(batch, cache), tokens)
            owned = [slot for slot in range(5) if shard.owns(slot)]
            rows = [shard.row(slot) for slot in owned]
            for field in ("temperature", "logsumexp", "state", "ids"):
                part, full = getattr(cache, field), getattr(whole, field)
                assert torch.equal(part[rows], full[owned])
            assert torch.equal(cells(cache)[rows], cells(whole)[owned])


@LAYOUTS
def test_a_cell_describes_the_law_and_sums_to_1(layout):
    batch = make_candidates(list(range(30)), 16, temperature=0.7)
    cache = make_cache(layout, 30, 1, 16)
    draw(batch, cache)
    q = (cells(cache)[:, 0] / cache.temperature - cache.logsumexp).exp()
    torch.testing.assert_close(q.sum(-1), torch.ones(30))
    expected = torch.zeros(30, 257).scatter(1, batch.ids, (batch.scores / 0.7).softmax(-1))
    torch.testing.assert_close(q, expected)
    assert bool((cache.temperature == 0.7).all())


@LAYOUTS
def test_the_previous_proposals_candidates_leave_nothing_behind(layout):
    """Overlapping candidates, candidates that are gone, and fewer of them; other cells are kept."""
    cache = make_cache(layout, 3, 2, 4)
    slots = torch.tensor([0, 2])
    first = Candidates(
        ids=torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]]),
        scores=torch.tensor([[0.5, 1.0, 1.5, 2.0]] * 2),
        idx_mapping=slots,
        steps=torch.tensor([1, 1]),
        positions=torch.tensor([5, 6]),
        temperature=torch.ones(3),
        seeds=torch.arange(3),
    )
    draw(first, cache)
    before = cells(cache)
    second = first.rows([0])._replace(
        ids=torch.tensor([[3, 250, -1, 1]]), scores=torch.tensor([[7.0, 8.0, 9.0, -INF]])
    )
    draw(second, cache)
    after = cells(cache)
    expected = torch.full((257,), -INF)
    expected[3], expected[250] = 7.0, 8.0
    assert torch.equal(after[0, 1], expected)
    assert cache.ids[0, 1].tolist() == [3, 250, -1, -1]
    assert torch.equal(after[1:], before[1:])
    assert torch.equal(after[0, 0], before[0, 0])


@LAYOUTS
def test_absent_candidates_are_never_drawn_and_kept_as_absent(layout):
    """Out of range, NaN, -inf, and the second of two equal ids: the first that counts counts."""
    ids = torch.tensor([[-1, 257, 10, 11, 12, 12, 13, 13]])
    scores = torch.tensor([[9.0, 9.0, NAN, -INF, 0.0, 50.0, NAN, 0.5]])
    slots = torch.zeros(1, dtype=torch.int64)
    drawn = set()
    for position in range(60):
        num_nans = torch.zeros(1, dtype=torch.int32)
        cache = make_cache(layout, 1, 1, 8)
        batch = Candidates(
            ids, scores, slots, slots, slots + position, torch.ones(1), torch.tensor([3])
        )
        drawn.add(int(draw(batch, cache, num_nans=num_nans)))
        assert cache.ids[0, 0].tolist() == [-1, -1, -1, -1, 12, -1, -1, 13]
        assert num_nans.tolist() == [1]
    assert drawn == {12, 13}
    row = cells(cache)[0, 0]
    assert (row > -INF).nonzero().flatten().tolist() == [12, 13]
    assert row[[12, 13]].tolist() == [0.0, 0.5]


@LAYOUTS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_candidate_gives_token_0_is_flagged_and_leaves_its_cell_empty(
    layout, temperature
):
    batch = make_candidates([0, 1, 2], 4, temperature=temperature)
    batch.scores[1] = torch.tensor([NAN, -INF, NAN, 1.0])
    batch.ids[1, 3] = -5
    cache, num_nans = make_cache(layout, 3, 1, 4), torch.zeros(3, dtype=torch.int32)
    tokens = draw(batch, cache, num_nans=num_nans)
    assert int(tokens[1]) == 0
    assert num_nans.tolist() == [0, 1, 0]
    assert cache.state[:, 0].tolist() == [CELL_STORED, CELL_EMPTY, CELL_STORED]
    assert torch.equal(draw(batch.rows([0, 2])), tokens[[0, 2]])
    assert bool((cells(cache)[1] == -INF).all())
    assert bool(cache.logsumexp.isfinite().all())


def test_ties_of_the_argmax_go_to_the_smallest_id():
    batch = make_candidates([0, 1], 5, temperature=0.0)
    batch.scores[:] = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    batch.ids[:] = torch.tensor([[4, 90, 30, 1, 200], [0, 7, 8, 1, 3]])
    assert draw(batch).tolist() == [30, 3]


def test_infinite_scores_share_the_probability():
    batch = make_candidates([0], 3)
    batch.scores[0] = torch.tensor([INF, 0.0, INF])
    drawn = {
        int(draw(batch._replace(positions=torch.tensor([position])))) for position in range(40)
    }
    assert drawn == set(batch.ids[0, [0, 2]].tolist())


def test_the_order_of_the_candidates_does_not_show():
    batch = make_candidates(list(range(50)), 16)
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(4))
    other = batch._replace(ids=batch.ids[:, shuffled], scores=batch.scores[:, shuffled])
    assert torch.equal(draw(batch), draw(other))


def test_draws_follow_the_scores():
    """Chi-square with 4 df, 20,000 draws, reject above 23.5; unnormalised argmax scores 80,000."""
    q = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04])
    slots = torch.arange(20_000)
    batch = Candidates(
        ids=torch.tensor([7, 3, 200, 0, 41]).expand(len(slots), -1).contiguous(),
        scores=q.log().expand(len(slots), -1).contiguous(),
        idx_mapping=slots,
        steps=slots * 0,
        positions=slots * 0 + 17,
        temperature=torch.ones(len(slots)),
        seeds=slots,
    )

    def score(tokens):
        counts = torch.bincount(tokens, minlength=257)[[7, 3, 200, 0, 41]]
        return float(((counts - len(slots) * q) ** 2 / (len(slots) * q)).sum())

    assert score(draw(batch)) < 23.5
    assert score(draw(batch, greedy=True)) > 1e4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dense_cache_of_another_dtype_rounds_scores_before_they_are_drawn_from(dtype):
    batch = make_candidates(list(range(40)), 16)
    batch = batch._replace(scores=batch.scores + 0.013)
    cache = make_cache(DENSE, 40, 1, 16, dtype=dtype)
    rounded = batch._replace(scores=batch.scores.to(dtype).float())
    assert draw(batch, cache).tolist() == by_dense_loop(rounded)
    stored = cache.logits[:, 0].gather(1, batch.ids)
    assert torch.equal(stored, batch.scores.to(dtype))


@LAYOUTS
@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_a_rank_writes_cells_of_its_own_requests_and_padding_is_inert(layout, shard):
    slots = [3, 0, -1, 6]
    batch = make_candidates(slots, 4, max_num_seqs=7)
    batch.scores[2] = NAN
    cache = make_cache(layout, 7, 2, 4, shard=shard)
    cache.temperature.fill_(7.25)
    num_nans = torch.zeros(7, dtype=torch.int32)
    tokens = draw(batch, cache, num_nans=num_nans)
    assert int(tokens[2]) == -1
    assert num_nans.tolist() == [0] * 7
    written = {(shard.row(slot), 0) for slot in slots if shard.owns(slot)}
    assert {tuple(cell) for cell in (cache.state == CELL_STORED).nonzero().tolist()} == written
    assert {tuple(cell) for cell in (cache.ids >= 0).any(-1).nonzero().tolist()} == written
    assert {tuple(cell) for cell in (cells(cache) > -INF).any(-1).nonzero().tolist()} == written
    assert int((cache.temperature != 7.25).sum()) == len(written)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ids": torch.zeros(2, 4)}, r"ids\)[^$]*int32 or int64"),
        ({"scores": torch.zeros(2, 3)}, r"scores\)[^$]*\[2, 4\]"),
        ({"scores": torch.zeros(2, 4, dtype=torch.bfloat16)}, r"scores\)[^$]*float32"),
        ({"scores": torch.zeros(4, 2).T}, "stride 1 between columns"),
        ({"steps": torch.zeros(3, dtype=torch.int64)}, r"steps\)"),
        ({"temperature": torch.ones(3)}, r"temperature\)[^$]*one value a slot"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(change, match):
    batch = make_candidates([0, 1], 4)
    with pytest.raises(TensorError, match=match):
        draw(batch._replace(**change))


def test_caches_and_options_that_do_not_fit_are_refused():
    batch = make_candidates([0, 1], 4)
    with pytest.raises(TensorError, match=r"another number of candidates[^$]*5 a cell; allowed: 4"):
        draw(batch, make_cache(DENSE, 2, 1, 5))
    view = dataclasses.replace(make_cache(DENSE, 2, 1, 4).view(), ids=None)
    with pytest.raises(TensorError, match=r"whole rows, without ids[^$]*sample_candidates"):
        cache_candidates(*batch, view, vocab_size=257)
    with pytest.raises(TensorError, match="no distribution to store"):
        draw(batch, make_cache(TOP_K, 2, 1, 4), greedy=True)
    with pytest.raises(TensorError, match="129 candidates; allowed: 1 to 128"):
        draw(make_candidates([0, 1], 129))


def test_an_empty_batch_draws_nothing():
    assert draw(make_candidates([0], 4).rows([])).shape == (0,)
