"""Which candidates a row has, and the walk over them, against dense loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from peak_memory import Peak
from specreg_dflash.candidates.best_columns import (
    BLOCK_COLUMNS,
    Candidates,
    log_normaliser,
    top_candidates,
)
from specreg_dflash.candidates.walk import walk
from specreg_dflash.dflash2.config import MAX_CANDIDATES
from specreg_dflash.dflash2.selector import CandidateSelector
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.kernels.cache_candidates.reference import MAX_CANDIDATES as MAX_OF_THE_OP
from specreg.ownership import Shard

DENSE, _, TOP_K = DraftLogitsLayout
NUM_REQS, NUM_STEPS, VOCAB_SIZE, RANK, HIDDEN = 3, 4, 257, 256, 8
COUNTS = [1, 4, 16]


def sorted_columns(row: Tensor) -> list[int]:
    """Columns of a row, the best first and equal ones by number, as Python sorts them."""
    values = row.float().tolist()
    return sorted(range(len(values)), key=lambda column: (-values[column], column))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [17, VOCAB_SIZE, 40 * BLOCK_COLUMNS, 40_961])
@pytest.mark.parametrize("num_candidates", COUNTS)
def test_candidates_are_the_best_columns_and_equal_ones_go_by_id(
    num_candidates: int, vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_candidates)
    logits = torch.randn(2, 3, vocab_size, generator=generator).to(dtype)
    logits[0] = (logits[0] * 2).round() / 2  # many equal ones, zeros of either sign among them
    logits[1, 0] = 1.0
    found = top_candidates(logits, num_candidates, vocab_size)
    assert found.logits.dtype == torch.float32
    for row, ids, values in zip(
        logits.view(-1, vocab_size),
        found.ids.flatten(0, 1),
        found.logits.flatten(0, 1),
        strict=True,
    ):
        assert ids.tolist() == sorted_columns(row)[:num_candidates]
        assert torch.equal(values, row[ids].float())


def test_finding_them_holds_little_beside_the_logits() -> None:
    vocab_size = 151_936
    logits = torch.randn(4, 7, vocab_size).bfloat16()
    with Peak(logits) as peak:
        top_candidates(logits, 16, vocab_size)
    assert peak.num_bytes < 0.3 * logits.nbytes  # keys of all columns would take four times these


@pytest.mark.parametrize("vocab_size", [5, 40 * BLOCK_COLUMNS - 1, 40 * BLOCK_COLUMNS + 1])
def test_padded_columns_are_no_candidates_even_beside_minus_infinity(vocab_size: int) -> None:
    logits = torch.full((2, vocab_size + 700), torch.inf)
    logits[:, :vocab_size] = -torch.inf
    logits[0, vocab_size - 1] = 3.0
    ids = top_candidates(logits, 4, vocab_size).ids
    assert ids.tolist() == [[vocab_size - 1, 0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 40 * BLOCK_COLUMNS])
def test_a_nan_comes_first_and_is_a_candidate_of_its_own(vocab_size: int) -> None:
    logits = torch.linspace(0, 1, vocab_size).repeat(2, 1)
    logits[0, [9, 3]] = torch.nan
    logits[1, [9, 3]] = -torch.tensor(torch.nan)
    ids = top_candidates(logits, 3, vocab_size).ids
    assert ids.tolist() == [[3, 9, vocab_size - 1]] * 2


def test_the_normaliser_is_that_of_the_whole_vocabulary_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = (10 * torch.randn(2, 3, VOCAB_SIZE)).bfloat16()
    expected = torch.logsumexp(logits.float(), dim=-1)
    assert torch.equal(log_normaliser(logits), expected)
    monkeypatch.setattr("specreg_dflash.candidates.best_columns.CHUNK_ELEMENTS", 2 * VOCAB_SIZE)
    torch.testing.assert_close(log_normaliser(logits), expected)


def selector(generator: torch.Generator) -> CandidateSelector:
    """One of rank 256 with small whole numbers, so that every sum is exact."""
    made = CandidateSelector(VOCAB_SIZE, RANK, HIDDEN)
    shapes = {name: value.shape for name, value in made.state_dict().items()}
    weights = {
        name: torch.randint(-1, 2, shape, generator=generator).float()
        for name, shape in shapes.items()
    }
    made.load_state_dict(weights, assign=True)
    return made.requires_grad_(False)


@pytest.mark.parametrize("num_candidates", COUNTS)
def test_edges_and_the_greedy_walk_equal_a_dense_loop(num_candidates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tables = selector(generator)
    hidden = torch.randint(-1, 2, (NUM_REQS, NUM_STEPS, HIDDEN), generator=generator).float()
    # Few values, so that rows tie at the boundary and walks tie within.
    logits = torch.randint(0, 9, (NUM_REQS, NUM_STEPS, VOCAB_SIZE), generator=generator).float()
    anchors = torch.tensor([0, 256, 100])
    candidates = top_candidates(logits, num_candidates, VOCAB_SIZE)
    edges = tables(hidden, candidates, anchors)
    sampler = make_sampler(None)
    positions = torch.arange(NUM_STEPS).expand(NUM_REQS, -1)
    drafts = walk(sampler, candidates.ids, edges, positions)

    before, after = tables.predecessor_codebook, tables.successor_codebook
    for request in range(NUM_REQS):
        previous = int(anchors[request])
        for step in range(NUM_STEPS):
            gate = tables.hidden_projection.weight @ hidden[request, step]
            ids = sorted_columns(logits[request, step])[:num_candidates]
            scores = {
                c: float(logits[request, step, c] + (before[previous] * gate * after[c]).sum())
                for c in ids
            }
            if step == 0:
                for row in edges[request, 0]:
                    assert row.tolist() == list(scores.values())
            previous = min(scores, key=lambda c: (-scores[c], c))
            assert int(drafts[request, step]) == previous


def make_sampler(
    layout: DraftLogitsLayout | None, num_candidates: int = 0, temperature: float = 0.0
) -> DraftSampler:
    cache = None
    if layout is not None:
        width = VOCAB_SIZE if layout is DENSE else num_candidates
        cache = DraftLogitsCache(
            torch.empty(NUM_REQS, NUM_STEPS, width),
            Shard(1, 0),
            layout,
            VOCAB_SIZE,
            num_candidates=num_candidates,
        )
    sampler = DraftSampler(
        cache=cache,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=NUM_REQS,
        num_speculative_tokens=NUM_STEPS,
        device="cpu",
        greedy=False,
    )
    begin(sampler, temperature)
    return sampler


def begin(sampler: DraftSampler, temperature: float) -> None:
    slots = torch.arange(NUM_REQS)
    sampler.begin(slots, slots, torch.full((NUM_REQS,), temperature), slots + 7)


def distributions(cache: DraftLogitsCache, temperature: float) -> Tensor:
    """q `[rows, steps, vocab_size]` of the cells, from what they hold and nothing else."""
    logits = cache.logits
    if cache.layout is TOP_K:
        assert cache.ids is not None
        # A column more takes the ids that are absent.
        dense = torch.full((NUM_REQS, NUM_STEPS, VOCAB_SIZE + 1), -torch.inf)
        at = torch.where(cache.ids < 0, VOCAB_SIZE, cache.ids).long()
        logits = dense.scatter(-1, at, logits)[..., :VOCAB_SIZE]
    return (logits / temperature - cache.logsumexp[..., None]).exp()


def proposals(num_candidates: int) -> Iterator[tuple[Candidates, Tensor]]:
    """Candidates and edges of three rounds, NaN and -inf among the scores."""
    generator = torch.Generator().manual_seed(3)
    tables = selector(generator)
    for share in (0.0, 0.5, 0.9):
        logits = torch.randn(NUM_REQS, NUM_STEPS, VOCAB_SIZE, generator=generator)
        candidates = top_candidates(logits, num_candidates, VOCAB_SIZE)
        hidden = 0.1 * torch.randn(NUM_REQS, NUM_STEPS, HIDDEN, generator=generator)
        edges = tables(hidden, candidates, torch.zeros(NUM_REQS, dtype=torch.int64))
        for fill in (torch.nan, -torch.inf):
            is_filled = torch.rand(edges.shape, generator=generator) < share / 2
            is_filled[..., 0] = False  # somebody is left
            edges = edges.masked_fill(is_filled, fill)
        yield candidates, edges


@pytest.mark.parametrize("num_candidates", COUNTS)
def test_drafts_are_candidates_and_their_distribution_lives_on_these_and_sums_to_1(
    num_candidates: int,
) -> None:
    temperature = 0.7
    positions = torch.arange(NUM_STEPS).expand(NUM_REQS, -1)
    drafts: dict[DraftLogitsLayout, list[Tensor]] = {}
    for layout in (DENSE, TOP_K):
        sampler = make_sampler(layout, num_candidates)
        cache = sampler.cache
        assert cache is not None
        drafts[layout] = []
        for candidates, edges in proposals(num_candidates):
            begin(sampler, temperature)
            drawn = walk(sampler, candidates.ids, edges, positions)
            drafts[layout].append(drawn)
            assert (candidates.ids == drawn[..., None]).any(-1).all()
            q = distributions(cache, temperature)
            torch.testing.assert_close(q.sum(-1), torch.ones(NUM_REQS, NUM_STEPS))
            # Nothing of an earlier round is left: the whole mass lies on this round's candidates.
            on_candidates = q.gather(-1, candidates.ids).sum(-1)
            torch.testing.assert_close(on_candidates, torch.ones(NUM_REQS, NUM_STEPS))
            assert (q.gather(-1, drawn[..., None]) > 0).all()
            row = torch.zeros(NUM_REQS, dtype=torch.int64)
            for step in range(NUM_STEPS):
                scores = edges[torch.arange(NUM_REQS), step, row] / temperature
                expected = scores.nan_to_num(nan=-torch.inf).softmax(-1)
                got = q[:, step].gather(-1, candidates.ids[:, step])
                torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
                row = (candidates.ids[:, step] == drawn[:, step, None]).int().argmax(-1)
    for dense, pairs in zip(drafts[DENSE], drafts[TOP_K], strict=True):
        assert torch.equal(dense, pairs)


def test_a_greedy_request_takes_the_best_of_its_row_and_is_verified_as_one_hot() -> None:
    sampler = make_sampler(TOP_K, 4, temperature=0.0)
    assert sampler.cache is not None
    candidates, edges = next(proposals(4))
    positions = torch.arange(NUM_STEPS).expand(NUM_REQS, -1)
    drawn = walk(sampler, candidates.ids, edges, positions)
    assert torch.equal(
        drawn[:, 0], candidates.ids[:, 0].gather(1, edges[:, 0, 0].argmax(-1)[:, None])[:, 0]
    )
    assert (sampler.cache.temperature == 0).all()
    assert torch.equal(drawn, walk(make_sampler(None), candidates.ids, edges, positions))


def test_a_row_without_a_score_offers_nothing_and_is_counted() -> None:
    sampler = make_sampler(TOP_K, 4, temperature=1.0)
    candidates, edges = next(proposals(4))
    edges[1] = torch.nan
    drawn = walk(sampler, candidates.ids, edges, torch.arange(NUM_STEPS).expand(NUM_REQS, -1))
    assert drawn[1].tolist() == [0] * NUM_STEPS
    assert sampler.num_nans.tolist() == [0, NUM_STEPS, 0]
    assert sampler.cache is not None
    assert sampler.cache.state.tolist()[1] == [0] * NUM_STEPS


def test_the_plugin_refuses_as_many_candidates_as_the_op_does() -> None:
    assert MAX_CANDIDATES == MAX_OF_THE_OP
