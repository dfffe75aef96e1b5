"""`cache_candidates` in Triton's interpreter against its torch twin; outputs are poisoned."""

import pytest
import torch
from candidates_cases import DENSE, TOP_K, make_cache, make_candidates

from specreg.kernels.cache_candidates.kernel import cache_candidates_triton
from specreg.kernels.cache_candidates.reference import cache_candidates_reference
from specreg.ownership import Shard

NAN, INF = float("nan"), float("inf")
FIELDS = ("logits", "temperature", "logsumexp", "state", "ids")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def agree(batches, cache_of, *, greedy=False):
    """Run kernel and twin over one proposal after another and compare every output byte."""
    results = []
    for implementation in (cache_candidates_triton, cache_candidates_reference):
        cache, drawn = cache_of(), []
        num_nans = torch.zeros_like(batches[0].seeds, dtype=torch.int32)
        for batch in batches:
            drawn.append(
                implementation(
                    *batch[:5],
                    None if greedy else batch.temperature,
                    batch.seeds,
                    None if cache is None else cache.view(),
                    vocab_size=257,
                    num_nans=num_nans,
                )
            )
        results.append((torch.cat(drawn), num_nans, cache))
    (tokens, num_nans, cache), (twin_tokens, twin_num_nans, twin) = results
    assert torch.equal(tokens, twin_tokens)
    assert torch.equal(num_nans, twin_num_nans)
    if cache is not None:
        for field in FIELDS:
            got, expected = getattr(cache, field), getattr(twin, field)
            if field == "logsumexp":
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(got, expected)
    return tokens


@pytest.mark.parametrize("layout", [DENSE, TOP_K])
@pytest.mark.parametrize("num_candidates", [1, 3, 16, 64])
@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_two_proposals_draw_and_store_as_the_twin(layout, num_candidates, shard):
    slots = [4, 0, -1, 2, 3, 1]
    batches = [
        make_candidates(
            slots, num_candidates, num_steps=2, temperature=[1, 0, 0.3, 1e-5, 0.7], seed=seed
        )
        for seed in range(2)
    ]
    agree(batches, lambda: make_cache(layout, 5, 2, num_candidates, shard=shard))


@pytest.mark.parametrize("layout", [DENSE, TOP_K])
def test_odd_candidates_agree(layout):
    batch = make_candidates([0, 1, 2, 3, 4, 5], 8, temperature=[1, 1, 1, 0, 0, 1e-38])
    batch.scores[0, [1, 5]] = NAN
    batch.scores[1] = NAN
    batch.scores[2, [0, 7]] = INF
    batch.scores[3] = 1.5
    batch.scores[4, :6] = -INF
    batch.ids[4, 2] = 257
    batch.ids[5, 1:4] = batch.ids[5, 0].clone()
    batch.ids[5, 7] = -1
    again = make_candidates([0, 1, 2, 3, 4, 5], 8, seed=1)
    again.ids[:, :3] = batch.ids[:, 3:6]
    agree([batch, again], lambda: make_cache(layout, 6, 1, 8))


def test_greedy_drafts_and_int32_ids_agree():
    batch = make_candidates([2, -1, 0], 5)
    agree([batch._replace(ids=batch.ids.int())], lambda: None, greedy=True)
    agree([batch._replace(ids=batch.ids.int())], lambda: make_cache(DENSE, 3, 1, 5))


def test_scores_are_rounded_into_a_dense_cache_of_another_dtype():
    batch = make_candidates([1, 0, 2], 16)
    batch = batch._replace(scores=batch.scores + 0.013)
    agree([batch], lambda: make_cache(DENSE, 3, 1, 16, dtype=torch.float16))


def test_an_empty_batch_launches_nothing():
    batch = make_candidates([0], 4).rows([])
    drawn = cache_candidates_triton(*batch, None, vocab_size=257, num_nans=None)
    assert drawn.shape == (0,)
