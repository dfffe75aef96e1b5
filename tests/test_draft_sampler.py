"""The one door for sampling drafts: maps, steps, statistics and the hash of a proposal."""

import pytest
import torch

from specreg.capabilities import DraftLogitsLayout, FusedSampling
from specreg.draft_logits import CELL_BARE, CELL_EMPTY, DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.errors import InternalError, PluginError, TensorError
from specreg.kernels import cache_candidates, draft_sample
from specreg.ownership import Shard, rows_per_rank

VOCAB_SIZE, MAX_NUM_SEQS, NUM_STEPS = 40, 5, 3
TEMPERATURE = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0])
SEEDS = torch.tensor([5, -6, 7, 2**40, 9])


def sampler_with(shard=None, **kwargs):
    cache = None
    if shard is not None:
        rows = rows_per_rank(MAX_NUM_SEQS, shard.num_shards)
        logits = torch.zeros(rows, NUM_STEPS, VOCAB_SIZE)
        cache = DraftLogitsCache(logits, shard, DraftLogitsLayout.DENSE, VOCAB_SIZE)
    settings = {
        "cache": cache,
        "vocab_size": VOCAB_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "num_speculative_tokens": NUM_STEPS,
        "device": "cpu",
        "greedy": False,
    }
    return DraftSampler(**(settings | kwargs))


def begin(sampler, slots, sample_slots=None):
    sample_slots = slots if sample_slots is None else sample_slots
    sampler.begin(torch.tensor(slots), torch.tensor(sample_slots), TEMPERATURE, SEEDS)


def logits_for(num_rows, seed=0):
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_sampling_step_by_step_is_draft_sample_with_the_bound_maps():
    sampler = sampler_with(Shard())
    begin(sampler, [3, -1, 0])
    logits, positions = logits_for(3), torch.tensor([9, 0, 4])
    ids = sampler.sample(logits, 2, positions)
    expected = draft_sample(
        logits,
        torch.tensor([3, -1, 0]),
        torch.full((3,), 2),
        positions,
        TEMPERATURE,
        SEEDS,
        None,
        vocab_size=VOCAB_SIZE,
    )
    assert torch.equal(ids, expected)
    assert torch.equal(sampler.cache.logits[[3, 0], 2], logits[[0, 2]])
    assert sampler.cache.state.nonzero().tolist() == [[0, 2], [3, 2]]


def test_all_steps_of_a_single_request_at_once_are_sampled():
    sampler = sampler_with(Shard())
    begin(sampler, [2])
    ids = sampler.sample(logits_for(NUM_STEPS), torch.arange(NUM_STEPS), torch.arange(NUM_STEPS))
    assert ids.shape == (NUM_STEPS,)
    assert sampler.cache.state[2].bool().all()


def test_all_steps_at_once_are_the_steps_one_by_one():
    """A parallel drafter passes the K rows of a request together."""
    logits = logits_for(2 * NUM_STEPS).view(2, NUM_STEPS, VOCAB_SIZE)
    positions = torch.tensor([[4, 5, 6], [9, 10, 11]])
    at_once, one_by_one = sampler_with(Shard(2, 0)), sampler_with(Shard(2, 0))
    begin(at_once, [4, 1])
    begin(one_by_one, [4, 1])
    ids = at_once.sample(
        logits.flatten(0, 1), torch.arange(NUM_STEPS).repeat(2), positions.flatten()
    ).view(2, NUM_STEPS)
    for step in range(NUM_STEPS):
        expected = one_by_one.sample(
            logits[:, step].contiguous(), step, positions[:, step].contiguous()
        )
        assert torch.equal(ids[:, step], expected)
    assert torch.equal(at_once.cache.logits, one_by_one.cache.logits)
    assert torch.equal(at_once.cache.logsumexp, one_by_one.cache.logsumexp)


def test_a_request_that_samples_nothing_is_emptied_and_stores_nothing():
    sampler = sampler_with(Shard())
    begin(sampler, [0, 2])
    sampler.sample(logits_for(2), 0, torch.tensor([3, 3]))
    begin(sampler, [0, 2], [-1, 2])
    ids = sampler.sample(logits_for(2, seed=1), 0, torch.tensor([4, 4]))
    assert int(ids[0]) == -1
    assert sampler.cache.state[:, 0].tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(sampler.cache.logits[0, 0], logits_for(2)[0])


def test_every_rank_draws_the_same_tokens_and_hashes_them_alike():
    hashes, drawn = set(), []
    for shard in (Shard(), Shard(2, 0), Shard(2, 1), Shard(4, 3)):
        sampler = sampler_with(shard)
        begin(sampler, [0, 1, 2, 3])
        tokens = torch.stack(
            [
                sampler.sample(logits_for(4, step), step, torch.full((4,), step))
                for step in range(3)
            ],
            1,
        )
        drawn.append(tokens.tolist())
        hashes.add(int(sampler.proposal_hash(tokens)))
    assert all(tokens == drawn[0] for tokens in drawn)
    assert len(hashes) == 1


def test_greedy_sampling_takes_the_argmax_and_has_no_cache():
    sampler = sampler_with(greedy=True)
    begin(sampler, [0, 3])
    logits = logits_for(2)
    assert torch.equal(sampler.sample(logits, 0, torch.tensor([1, 1])), logits.argmax(-1))
    with pytest.raises(InternalError, match=r"no distribution to store[^$]*allocate no cache"):
        sampler_with(Shard(), greedy=True)


def test_ids_of_a_reduced_vocabulary_are_target_ids():
    sampler = sampler_with(Shard(), target_ids=torch.arange(0, VOCAB_SIZE, 2))
    begin(sampler, [0, 1])
    ids = sampler.sample(logits_for(2)[:, :20].contiguous(), 0, torch.tensor([1, 1]))
    assert bool((ids % 2 == 0).all())
    assert bool((sampler.cache.logits[:2, 0, 1::2] == -torch.inf).all())


@pytest.mark.parametrize("layout", [DraftLogitsLayout.DENSE, DraftLogitsLayout.TOP_K])
def test_candidates_are_cache_candidates_with_the_bound_maps(layout):
    width = VOCAB_SIZE if layout is DraftLogitsLayout.DENSE else 4
    caches = [
        DraftLogitsCache(
            torch.zeros(MAX_NUM_SEQS, NUM_STEPS, width),
            Shard(),
            layout,
            VOCAB_SIZE,
            num_candidates=4,
        )
        for _ in range(2)
    ]
    scores, ids = logits_for(3).topk(4)
    sampler = sampler_with(cache=caches[0])
    begin(sampler, [3, -1, 0])
    tokens = sampler.sample_candidates(ids, scores, 1, torch.tensor([9, 0, 4]))
    expected = cache_candidates(
        ids,
        scores,
        torch.tensor([3, -1, 0]),
        torch.ones(3, dtype=torch.int64),
        torch.tensor([9, 0, 4]),
        TEMPERATURE,
        SEEDS,
        caches[1].view(),
        vocab_size=VOCAB_SIZE,
    )
    assert torch.equal(tokens, expected)
    for field in ("logits", "ids", "state", "temperature"):
        assert torch.equal(getattr(caches[0], field), getattr(caches[1], field))
    greedy = sampler_with(greedy=True)
    begin(greedy, [3, -1, 0])
    best = greedy.sample_candidates(ids, scores, 1, torch.tensor([9, 0, 4]))
    assert best.tolist() == [int(ids[0, 0]), -1, int(ids[2, 0])]


@pytest.mark.parametrize(
    ("target_ids", "offending"), [([3, 5, 3], r"\[3\]"), ([-1, 2, VOCAB_SIZE], r"\[-1, 40\]")]
)
def test_a_map_that_repeats_or_leaves_the_vocabulary_is_refused(target_ids, offending):
    with pytest.raises(TensorError, match=rf"such as {offending}[^$]*offsets to add"):
        sampler_with(target_ids=torch.tensor(target_ids))


def test_bad_rows_are_counted_by_slot_until_the_host_clears_them():
    sampler = sampler_with(Shard())
    begin(sampler, [3, 0])
    logits = logits_for(2)
    logits[0, 1] = torch.nan
    for step in range(2):
        sampler.sample(logits, step, torch.tensor([1, 1]))
    assert sampler.num_nans.tolist() == [0, 0, 0, 2, 0]
    sampler.num_nans.zero_()
    assert sampler.num_nans.tolist() == [0] * 5


def test_a_hash_shows_each_change_of_a_token_and_the_order():
    sampler = sampler_with()
    tokens = torch.randint(-1, 2**31, (MAX_NUM_SEQS, NUM_STEPS))
    tokens[0, :2] = torch.tensor([7, 8])
    hashes = {int(sampler.proposal_hash(tokens))}
    for place in range(tokens.numel()):
        changed = tokens.clone()
        changed.view(-1)[place] += 1
        hashes.add(int(sampler.proposal_hash(changed)))
    swapped = tokens.clone()
    swapped[0, :2] = torch.tensor([8, 7])
    for other in (swapped, tokens.flip(0), tokens[:4], tokens[:, :2], tokens[:0]):
        hashes.add(int(sampler.proposal_hash(other)))
    assert len(hashes) == 1 + tokens.numel() + 5


@pytest.mark.parametrize(
    ("num_rows", "step", "match"),
    [
        (3, 0, r"3 rows for 2 requests[^$]*padding"),
        (2, 3, r"sample\(step\)[^$]*0 to 2"),
        (2, -1, "outside its proposal"),
        (2, torch.zeros(3, dtype=torch.int64), r"steps\)"),
    ],
)
def test_rows_and_steps_that_do_not_fit_are_refused(num_rows, step, match):
    sampler = sampler_with(Shard())
    begin(sampler, [0, 1])
    with pytest.raises(TensorError, match=match):
        sampler.sample(logits_for(num_rows), step, torch.zeros(num_rows, dtype=torch.int64))


def test_sampling_before_a_proposal_has_begun_is_refused():
    with pytest.raises(TensorError, match=r"2 rows for 0 requests[^$]*host has called begin"):
        sampler_with().sample(logits_for(2), 0, torch.zeros(2, dtype=torch.int64))


def test_more_tokens_than_the_slots_can_have_are_not_hashed():
    with pytest.raises(TensorError, match="allowed: at most 15"):
        sampler_with().proposal_hash(torch.zeros(MAX_NUM_SEQS + 1, NUM_STEPS, dtype=torch.int64))


def test_a_block_is_drawn_at_once_as_step_by_step():
    slots, positions = [3, -1, 0], torch.tensor([[9, 10, 11], [0, 1, 2], [4, 5, 6]])
    logits = logits_for(9).view(3, NUM_STEPS, VOCAB_SIZE)
    at_once, one_by_one = sampler_with(Shard()), sampler_with(Shard())
    begin(at_once, slots)
    begin(one_by_one, slots)
    drafts = at_once.sample_block(logits, positions)
    steps = [
        one_by_one.sample(logits[:, i], i, positions[:, i].contiguous()) for i in range(NUM_STEPS)
    ]
    assert torch.equal(drafts, torch.stack(steps, 1))
    assert torch.equal(at_once.cache.logits, one_by_one.cache.logits)
    assert torch.equal(at_once.cache.state, one_by_one.cache.state)


def test_a_block_with_more_steps_than_the_proposal_is_refused():
    sampler = sampler_with()
    begin(sampler, [0])
    shape = (1, NUM_STEPS + 1)
    with pytest.raises(TensorError, match="a draft lies outside its proposal"):
        sampler.sample_block(torch.zeros(*shape, VOCAB_SIZE), torch.zeros(shape, dtype=torch.int64))


def test_a_declared_fused_sampler_is_lent_what_the_host_has_bound():
    sampler = sampler_with(Shard(2, 1), fused_sampling=FusedSampling.SHARDED)
    begin(sampler, [3, -1, 0], [3, -1, -1])
    lent = sampler.lend()
    assert lent.slots.tolist() == [3, -1, -1]
    assert (lent.temperature is TEMPERATURE, lent.seeds is SEEDS) == (True, True)
    assert lent.cache is sampler.cache.view()
    assert lent.num_nans is sampler.num_nans
    assert (lent.vocab_size, lent.target_ids, lent.greedy) == (VOCAB_SIZE, None, False)


def test_a_sampler_lends_nothing_to_who_declares_no_fused_sampling():
    sampler = sampler_with(Shard())
    begin(sampler, [0])
    with pytest.raises(PluginError, match="fused_sampling none; allowed: full_cache or sharded"):
        sampler.lend()


def test_marking_bare_takes_the_owned_cells_of_requests_that_sample():
    sampler = sampler_with(Shard(2, 1), fused_sampling=FusedSampling.SHARDED)
    begin(sampler, [3, -1, 0, 1], [3, -1, 0, -1])
    sampler.mark_bare()
    states = [[CELL_EMPTY] * NUM_STEPS, [CELL_BARE] * NUM_STEPS, [CELL_EMPTY] * NUM_STEPS]
    assert sampler.cache.state.tolist() == states
    assert sampler.cache.temperature[1].tolist() == [2.0] * NUM_STEPS


def test_marking_bare_without_a_cache_does_nothing():
    sampler = sampler_with(greedy=True, fused_sampling=FusedSampling.SHARDED)
    begin(sampler, [0])
    sampler.mark_bare()
    assert sampler.lend().cache is None
