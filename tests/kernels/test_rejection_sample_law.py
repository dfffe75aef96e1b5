"""The law of what is emitted, against the target's; and what broken variants score.

Chi-square of the first token over 20,000 seeds has 4 degrees of freedom here: above 23.5 lies a
share of 1e-4. Acceptance rates are compared within 5 sigma. The seeds are fixed, so no test
flickers.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from verification_cases import Batch, make_cache

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.kernels import rejection_sample
from specreg.kernels.draft_sample.op import draft_sample
from specreg.kernels.random import STREAM_DRAFT, random_words_reference
from specreg.kernels.rejection_sample import reference
from specreg.kernels.rejection_sample.draws import reference as draws
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.ownership import Shard
from specreg.rejection_sampler import RejectionSampler, VerifyInputs

NUM_SEEDS = 20_000
TARGET = torch.tensor([0.05, 0.15, 0.25, 0.25, 0.30])
DRAFT = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04])
CRITICAL = 23.5
ACCEPTANCE = 0.44  # sum of min(p, q)
SLOTS = torch.arange(NUM_SEEDS)
ONES = torch.ones(NUM_SEEDS)


def chi_square(tokens: torch.Tensor, law: torch.Tensor = TARGET) -> float:
    counts = torch.bincount(tokens, minlength=len(law)).double()
    expected = law.double() * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


def within_5_sigma(num_hits: int, rate: float, num_draws: int = NUM_SEEDS) -> bool:
    return abs(num_hits / num_draws - rate) < 5 * (rate * (1 - rate) / num_draws) ** 0.5


@dataclass
class Verified:
    """What 20,000 requests emitted, one a seed."""

    tokens: torch.Tensor
    num_accepted: int

    @property
    def score(self) -> float:
        return chi_square(self.tokens)


@functools.cache
def propose(*, drafted_at: float = 1.0, greedy: bool = False) -> Batch:
    """A draft from `DRAFT` for each seed; the target's rows are `TARGET` at temperature 1."""
    cache = None if greedy else make_cache(NUM_SEEDS, 1, 5)
    draft_tokens = draft_sample(
        DRAFT.log().expand(NUM_SEEDS, 5),
        SLOTS,
        SLOTS * 0,
        SLOTS * 0 + 3,
        ONES * drafted_at,
        SLOTS,
        cache,
        vocab_size=5,
        greedy=greedy,
    )
    return Batch(
        target_logits=TARGET.log().expand(2 * NUM_SEEDS, 5),
        draft_tokens=draft_tokens[:, None],
        idx_mapping=SLOTS,
        cu_num_logits=torch.arange(NUM_SEEDS + 1) * 2,
        positions=SLOTS * 0 + 3,
        temperature=ONES,
        seeds=SLOTS,
        cache=cache,
    )


def verify(batch: Batch) -> Verified:
    output = rejection_sample(*batch, vocab_size=5)
    return Verified(output.sampled[:, 0], int((output.num_sampled == 2).sum()))


def test_the_first_token_follows_the_target_and_half_of_the_drafts_survive():
    verified = verify(propose())  # scores 4.6, accepts 0.445
    assert verified.score < CRITICAL
    assert within_5_sigma(verified.num_accepted, ACCEPTANCE)


def test_the_real_path_of_draft_sampler_and_rejection_sampler_follows_the_target():
    logits = torch.full((NUM_SEEDS, 1, 5), -50.0)
    cache = DraftLogitsCache(logits, Shard(), DraftLogitsLayout.DENSE, 5)
    sampler = DraftSampler(
        cache=cache,
        vocab_size=5,
        max_num_seqs=NUM_SEEDS,
        num_speculative_tokens=1,
        device="cpu",
        greedy=False,
    )
    sampler.begin(SLOTS, SLOTS, ONES, SLOTS)
    drafts = sampler.sample(DRAFT.log().expand(NUM_SEEDS, 5), 0, SLOTS * 0 + 3)
    order = torch.randperm(NUM_SEEDS, generator=torch.Generator().manual_seed(5))
    inputs = VerifyInputs(
        target_logits=TARGET.log().expand(2 * NUM_SEEDS, 5),
        draft_tokens=drafts[order, None],
        idx_mapping=order,
        cu_num_logits=torch.arange(NUM_SEEDS + 1) * 2,
        positions=SLOTS * 0 + 3,
        expanded_idx_mapping=order.repeat_interleave(2),
        temperature=ONES,
        seeds=SLOTS,
        top_k=SLOTS * 0,
        top_p=ONES,
        min_p=ONES * 0,
        has_cutoffs=False,
        draft_logits=cache,
    )
    output = RejectionSampler(vocab_size=5)(inputs)
    assert chi_square(output.sampled[:, 0]) < CRITICAL
    assert within_5_sigma(int((output.num_sampled == 2).sum()), ACCEPTANCE)
    # The batch was permuted between proposal and verification: it makes no difference.
    assert torch.equal(output.sampled[order.argsort(), 0], verify(propose()).tokens)


def test_cut_offs_change_the_law_that_is_followed_and_not_the_draft_distribution():
    batch = propose()
    top_k = SLOTS * 0 + 3
    inputs = VerifyInputs(
        **{name: value for name, value in batch._asdict().items() if name != "cache"},
        expanded_idx_mapping=SLOTS.repeat_interleave(2),
        top_k=top_k,
        top_p=ONES,
        min_p=ONES * 0,
        has_cutoffs=True,
        draft_logits=_Viewed(batch.cache),
    )
    subset = replace(
        inputs,
        target_logits=batch.target_logits[:8000],
        draft_tokens=batch.draft_tokens[:4000],
        idx_mapping=SLOTS[:4000],
        cu_num_logits=batch.cu_num_logits[:4001],
        positions=batch.positions[:4000],
        expanded_idx_mapping=inputs.expanded_idx_mapping[:8000],
    )
    output = RejectionSampler(vocab_size=5)(subset)
    cut = torch.tensor([0.0, 0.0, 0.25, 0.25, 0.30]) / 0.8
    tokens = output.sampled[:, 0]
    assert tokens.min() >= 2
    assert chi_square(tokens - 2, cut[2:]) < 18.4  # 2 degrees of freedom, 1e-4
    rate = float(torch.minimum(cut, DRAFT).sum())
    assert within_5_sigma(int((output.num_sampled == 2).sum()), rate, 4000)


@dataclass
class _Viewed:
    """A view where a cache is expected."""

    kept: object
    may_have_bare_cells: bool = False

    def view(self):
        return self.kept


def test_greedy_drafts_are_verified_as_one_hot():
    batch = propose(greedy=True)
    assert (batch.draft_tokens == 0).all()
    verified = verify(batch)  # scores 1.9, accepts 0.051
    assert verified.score < CRITICAL
    assert within_5_sigma(verified.num_accepted, float(TARGET[0]))


def test_sampled_drafts_verified_as_one_hot_stay_unbiased_and_lose_acceptance():
    verified = verify(propose()._replace(cache=None))  # scores 1.7, accepts 0.118
    assert verified.score < CRITICAL
    assert within_5_sigma(verified.num_accepted, float((TARGET * DRAFT).sum()))


def test_the_draft_distribution_is_that_of_the_cell_when_the_temperature_changes():
    verified = verify(propose(drafted_at=0.5))  # scores 2.8, accepts 0.174
    assert verified.score < CRITICAL
    cold = (DRAFT.log() / 0.5).softmax(0)
    assert within_5_sigma(verified.num_accepted, float(torch.minimum(TARGET, cold).sum()))


def test_every_position_of_a_round_follows_the_target():
    """Joint of the first two tokens over rounds of 2 drafts that depend on the position."""
    num_drafts = 2
    first_p, second_p = torch.tensor([3.0, 3, 1]) / 7, torch.tensor([9.0, 64, 64]) / 137
    first_q, second_q = torch.tensor([9.0, 1, 3]) / 13, torch.tensor([7.0, 1, 4]) / 12
    cache = make_cache(NUM_SEEDS, num_drafts, 3)
    draft = torch.stack([first_q, second_q]).log().repeat(NUM_SEEDS, 1)
    slots = SLOTS.repeat_interleave(num_drafts)
    steps = torch.arange(num_drafts).repeat(NUM_SEEDS)
    ids = draft_sample(draft, slots, steps, 3 + steps, ONES, SLOTS, cache, vocab_size=3)
    target = torch.stack([first_p, second_p, first_p]).log().repeat(NUM_SEEDS, 1)
    output = rejection_sample(
        target,
        ids.view(-1, num_drafts),
        SLOTS,
        torch.arange(NUM_SEEDS + 1) * 3,
        SLOTS * 0 + 3,
        ONES,
        SLOTS,
        cache,
        vocab_size=3,
    )
    reached = output.num_sampled > 1
    first, second = output.sampled[:, 0], output.sampled[reached, 1]
    assert chi_square(first, first_p) < 18.4
    assert chi_square(second, second_p) < 18.4
    joint = output.sampled[reached, 0] * 3 + second
    first_kept = torch.minimum(first_p, first_q) / torch.minimum(first_p, first_q).sum()
    assert chi_square(joint, (first_kept[:, None] * second_p).flatten()) < 31.8  # 8 degrees
    bonus = output.sampled[output.num_sampled == 3, 2]
    assert chi_square(bonus, first_p) < 18.4


# Broken variants, each of which must fail the tests above.


def test_noise_shared_between_drafting_and_the_residual_is_caught(monkeypatch):
    """Scores 3,836."""
    monkeypatch.setattr(draws, "STREAM_RESIDUAL", STREAM_DRAFT)
    assert verify(propose()).score > 100 * CRITICAL


def test_noise_shared_between_drafting_and_acceptance_is_caught(monkeypatch):
    """Scores 438."""

    def words(seeds, positions, steps, stream):
        if stream is not rows_reference.STREAM_ACCEPT:
            return random_words_reference(seeds, positions, steps, stream)
        # The word that chose the draft within its block; the one that chose the block is idle here.
        return random_words_reference(seeds, positions, steps, STREAM_DRAFT).roll(-1, 0)

    monkeypatch.setattr(rows_reference, "random_words_reference", words)
    assert verify(propose()).score > 10 * CRITICAL


def test_a_residual_that_forgets_the_draft_distribution_is_caught(monkeypatch):
    """Scores 1,877."""

    def target_only(rows, probs, top, log_totals, weight):
        return torch.exp(rows.target.logits - (top + log_totals)[:, None, None])

    monkeypatch.setattr(draws, "excess_reference", target_only)
    assert verify(propose()).score > 10 * CRITICAL


def test_a_sampler_that_always_accepts_is_caught(monkeypatch):
    """Scores 126,352."""
    monkeypatch.setattr(
        rows_reference, "uniform_reference", lambda words: torch.full(words.shape, 1e-30)
    )
    verified = verify(propose())
    assert verified.num_accepted == NUM_SEEDS
    assert verified.score > 100 * CRITICAL


def test_argmax_drafts_verified_with_the_full_draft_distribution_are_caught():
    """Scores 4,617."""
    batch = propose()
    argmax = torch.zeros_like(batch.draft_tokens)
    verified = verify(batch._replace(draft_tokens=argmax))
    assert verified.score > 100 * CRITICAL


def test_a_stale_cell_is_caught():
    """Scores 4,170."""
    batch = propose()
    uniform = torch.full_like(batch.cache.logits, 0.0)
    lse = torch.full_like(batch.cache.logsumexp, float(torch.tensor(5.0).log()))
    stale = replace(batch.cache, logits=uniform, logsumexp=lse)
    assert verify(batch._replace(cache=stale)).score > 10 * CRITICAL


def test_a_draft_distribution_taken_at_the_requests_present_temperature_is_caught():
    """Scores 1,699."""
    batch = propose(drafted_at=0.5)
    now = replace(
        batch.cache,
        temperature=torch.ones_like(batch.cache.temperature),
        logsumexp=batch.cache.logits.logsumexp(-1),
    )
    assert verify(batch._replace(cache=now)).score > 10 * CRITICAL


def exact_law(monkeypatch, batch: Batch, vocab_size: int) -> torch.Tensor:
    """The law of the first token's draw, from the units that a request a block is drawn with."""
    num_blocks = -(-vocab_size // draws.BLOCK_SIZE)
    units = []

    def draw(weights, words):
        units.append(weights.double())
        first = len(units) % 2
        return torch.arange(len(weights)) if first else torch.zeros(len(weights), dtype=torch.int64)

    monkeypatch.setattr(draws, "draw_index_reference", draw)
    rejection_sample(*batch, vocab_size=vocab_size)
    masses, lanes = units
    assert masses.shape[0] == lanes.shape[0] == num_blocks
    law = (masses[0] / masses[0].sum())[:, None] * (lanes / lanes.sum(1, keepdim=True).clamp(min=1))
    return law.flatten()[:vocab_size]


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["residual", "without draft", "target"])
def test_the_exact_law_of_each_draw_is_within_1e_4_of_what_it_stands_for(monkeypatch, kind, scale):
    """In total variation; 1e-6 at most here, the grid of the random words apart."""
    vocab_size, temperature = 30_001, 0.9
    num_blocks = -(-vocab_size // draws.BLOCK_SIZE)
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(vocab_size, generator=generator) * scale
    draft = target + torch.randn(vocab_size, generator=generator) * 0.5
    slots = torch.arange(num_blocks)
    cache = make_cache(num_blocks, 1, vocab_size)
    cache.logits[:] = draft
    cache.temperature.fill_(0.0 if kind == "without draft" else temperature)
    cache.logsumexp.copy_((draft / temperature).logsumexp(0))
    cache.state.fill_(1)
    token = int(target.argmax())
    p, q = (target.double() / temperature).softmax(0), (draft.double() / temperature).softmax(0)
    without = p.clone()
    without[token] = 0
    expected = {"residual": (p - q).clamp(min=0), "without draft": without, "target": p}[kind]
    monkeypatch.setattr(reference, "passes", lambda log_u, chance: log_u > torch.inf)
    batch = Batch(
        target_logits=target.expand(2 * num_blocks, vocab_size),
        draft_tokens=torch.full((num_blocks, 1), -1 if kind == "target" else token),
        idx_mapping=slots,
        cu_num_logits=torch.arange(num_blocks + 1) * 2,
        positions=slots,
        temperature=torch.full((num_blocks,), temperature),
        seeds=slots,
        cache=cache,
    )
    monkeypatch.setattr(rows_reference, "CHUNK_ELEMENTS", num_blocks * vocab_size)
    law = exact_law(monkeypatch, batch, vocab_size)
    expected = expected / expected.sum()
    assert float((law - expected).abs().sum()) / 2 < 1e-4


VOCAB_SIZE = 16


def drawn_by_purpose() -> dict[str, torch.Tensor]:
    """Draws from a uniform law for one (seed, position) each, by what they are for."""
    flat = torch.zeros(2 * NUM_SEEDS, VOCAB_SIZE)
    position = SLOTS * 0 + 100

    def emitted(drafts, rows, positions, step):
        output = rejection_sample(
            flat[: rows * NUM_SEEDS],
            drafts,
            SLOTS,
            torch.arange(NUM_SEEDS + 1) * rows,
            positions,
            ONES,
            SLOTS,
            None,
            vocab_size=VOCAB_SIZE,
        )
        return output.sampled[:, step], output.num_sampled

    none = torch.full((NUM_SEEDS, 1), -1)
    steps = SLOTS * 0
    draft = draft_sample(
        flat[:NUM_SEEDS], SLOTS, steps, position, ONES, SLOTS, None, vocab_size=VOCAB_SIZE
    )
    residual, _ = emitted(none, 2, position, 0)
    plain, _ = emitted(none, 1, position, 0)
    certain = torch.full((2 * NUM_SEEDS, VOCAB_SIZE), 0.0)
    certain[::2, 1:] = -torch.inf
    bonus = rejection_sample(
        certain,
        none * 0,
        SLOTS,
        torch.arange(NUM_SEEDS + 1) * 2,
        position - 1,
        ONES,
        SLOTS,
        None,
        vocab_size=VOCAB_SIZE,
    )
    assert (bonus.num_sampled == 2).all()
    # Acceptance against p(d) = 1/2: one bit a seed, spread over four of each for a joint histogram.
    halves = torch.full((2 * NUM_SEEDS, VOCAB_SIZE), -torch.inf)
    halves[:, :2] = 0.0
    accepted = rejection_sample(
        halves,
        none * 0,
        SLOTS,
        torch.arange(NUM_SEEDS + 1) * 2,
        position,
        ONES,
        SLOTS,
        None,
        vocab_size=VOCAB_SIZE,
    ).num_sampled
    return {
        "draft": draft,
        "residual": residual,
        "bonus": bonus.sampled[:, 1],
        "plain": plain,
        "acceptance": (accepted == 2).long(),
    }


def dependence(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of the joint histogram less its degrees of freedom, in sigma.

    -1.95 to 1.13 over the ten pairs; 14,132 for a shared stream.
    """
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    table.index_put_((first, second), torch.ones(NUM_SEEDS, dtype=torch.float64), accumulate=True)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / NUM_SEEDS
    degrees = (table.shape[0] - 1) * (table.shape[1] - 1)
    score = float(((table - expected) ** 2 / expected).sum())
    return (score - degrees) / (2 * degrees) ** 0.5


def test_draws_for_drafting_acceptance_residual_bonus_and_plain_tokens_are_pairwise_independent():
    draws = drawn_by_purpose()
    scores = {
        pair: dependence(draws[pair[0]], draws[pair[1]])
        for pair in itertools.combinations(sorted(draws), 2)
    }
    assert max(scores.values()) < 5, scores


@pytest.mark.parametrize("stream", ["STREAM_RESIDUAL", "STREAM_TARGET"])
def test_a_stream_shared_with_drafting_fails_that_test(monkeypatch, stream):
    monkeypatch.setattr(draws, stream, STREAM_DRAFT)
    drawn = drawn_by_purpose()
    purpose = {"STREAM_RESIDUAL": "residual", "STREAM_TARGET": "plain"}[stream]
    assert dependence(drawn["draft"], drawn[purpose]) > 1000
