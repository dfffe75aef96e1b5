"""The stock rejection sampler: cut-offs in front of verification, and its guard."""

from dataclasses import replace

import pytest
import torch
from kernels.verification_cases import emitted, random_requests

from specreg import rejection_sampler
from specreg.capabilities import DraftLogitsLayout
from specreg.cutoffs import apply_cutoffs
from specreg.draft_logits import CELL_STORED, DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.errors import ConfigError, InternalError
from specreg.kernels import rejection_sample
from specreg.ownership import Shard, rows_per_rank
from specreg.rejection_sampler import RejectionSampler, VerifyInputs, check_receives

VOCAB_SIZE = 900
NUM_DRAFTS = 3
SLOTS = [4, 0, 2, 5, 1, 3]


def make_cache(shard=Shard(), num_slots=6):  # noqa: B008 - frozen
    shape = (rows_per_rank(num_slots, shard.num_shards), NUM_DRAFTS, VOCAB_SIZE)
    return DraftLogitsCache(torch.empty(shape), shard, DraftLogitsLayout.DENSE, VOCAB_SIZE)


def make_inputs(**changes) -> VerifyInputs:
    """Six requests with drafts of their own, in the order of `SLOTS`."""
    requests = random_requests(6, VOCAB_SIZE, NUM_DRAFTS)
    slots = torch.tensor(SLOTS)
    temperature, seeds = torch.zeros(6), torch.zeros(6, dtype=torch.int64)
    temperature[slots] = torch.tensor([request.temperature for request in requests])
    seeds[slots] = torch.tensor([request.seed for request in requests])
    cache = make_cache()
    sampler = DraftSampler(
        cache=cache,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=6,
        num_speculative_tokens=NUM_DRAFTS,
        device="cpu",
        greedy=False,
    )
    sampler.begin(slots, slots, temperature, seeds)
    positions = torch.tensor([request.position for request in requests])
    steps = torch.arange(NUM_DRAFTS)
    drafts = sampler.sample(
        torch.cat([request.draft for request in requests]),
        steps.repeat(6),
        (positions[:, None] + steps).flatten(),
    )
    inputs = VerifyInputs(
        target_logits=torch.cat([request.target for request in requests]),
        draft_tokens=drafts.view(6, NUM_DRAFTS),
        idx_mapping=slots,
        cu_num_logits=torch.arange(7, dtype=torch.int32) * (NUM_DRAFTS + 1),
        positions=positions,
        expanded_idx_mapping=slots.repeat_interleave(NUM_DRAFTS + 1),
        temperature=temperature,
        seeds=seeds,
        top_k=torch.tensor([0, 5, 0, 0, 3, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.3, 1.0, 0.9, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0, 0.0]),
        has_cutoffs=True,
        draft_logits=cache,
    )
    return replace(inputs, **changes)


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def verify_without_chunks(inputs: VerifyInputs, logits: torch.Tensor):
    return rejection_sample(
        logits,
        inputs.draft_tokens,
        inputs.idx_mapping,
        inputs.cu_num_logits,
        inputs.positions,
        inputs.temperature,
        inputs.seeds,
        inputs.draft_logits.view(),
        vocab_size=VOCAB_SIZE,
    )


@pytest.mark.parametrize("has_cutoffs", [False, True])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_bare_cells_get_their_statistics_before_drafts_are_judged(method, has_cutoffs):
    stored, bare = make_inputs(has_cutoffs=has_cutoffs), make_inputs(has_cutoffs=has_cutoffs)
    cache = bare.draft_logits
    cache.logsumexp.fill_(float("nan"))
    cache.state.zero_()
    slots = bare.idx_mapping.repeat_interleave(NUM_DRAFTS)
    cache.mark_bare(slots, torch.arange(NUM_DRAFTS).repeat(6), bare.temperature)
    sampler = RejectionSampler(method, vocab_size=VOCAB_SIZE)
    output = sampler(bare)
    assert equal(output, sampler(stored))
    assert len(set(output.num_sampled.tolist())) > 1
    assert (cache.state == CELL_STORED).all()


def test_caches_that_never_held_bare_cells_cost_nothing_more(monkeypatch):
    monkeypatch.setattr(rejection_sampler, "cell_statistics", None)
    inputs = make_inputs(has_cutoffs=False)
    assert not inputs.draft_logits.may_have_bare_cells
    RejectionSampler(vocab_size=VOCAB_SIZE)(inputs)


@pytest.mark.parametrize(
    ("length", "rates"),
    [
        (1.0, [0.0, 0.0, 0.0]),
        (2.5, [1.0, 0.5, 0.0]),
        (4.0, [1.0, 1.0, 1.0]),
    ],
)
def test_a_synthetic_length_becomes_rates_of_least_variance(length, rates):
    inputs = make_inputs(has_cutoffs=False)
    by_length = RejectionSampler("synthetic", vocab_size=VOCAB_SIZE, acceptance_length=length)
    by_rates = RejectionSampler("synthetic", vocab_size=VOCAB_SIZE, acceptance_rates=rates)
    assert equal(by_length(inputs), by_rates(inputs))
    assert by_length._rates_of(inputs.draft_tokens).tolist() == rates


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("synthetic", {}, "0 of the two"),
        ("synthetic", {"acceptance_rates": [1.0], "acceptance_length": 1.0}, "2 of the two"),
        ("block", {"acceptance_length": 1.0}, "none with other methods"),
    ],
)
def test_rates_go_with_synthetic_alone(method, arguments, message):
    with pytest.raises(ConfigError, match=message):
        RejectionSampler(method, vocab_size=VOCAB_SIZE, **arguments)


def test_without_cut_offs_the_logits_go_to_the_op_as_they_are(monkeypatch):
    monkeypatch.setattr(rejection_sampler, "apply_cutoffs", None)
    inputs = make_inputs(has_cutoffs=False)
    output = RejectionSampler(vocab_size=VOCAB_SIZE)(inputs)
    assert equal(output, verify_without_chunks(inputs, inputs.target_logits))


def test_drafts_are_judged_against_what_the_cut_offs_leave():
    inputs = make_inputs()
    before = inputs.target_logits.clone()
    cut = apply_cutoffs(
        inputs.target_logits,
        inputs.expanded_idx_mapping,
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        vocab_size=VOCAB_SIZE,
    )
    output = RejectionSampler(vocab_size=VOCAB_SIZE)(inputs)
    assert equal(output, verify_without_chunks(inputs, cut))
    assert torch.equal(inputs.target_logits, before)
    for b, tokens in enumerate(emitted(output)):
        assert all(cut[4 * b + i, token] > -torch.inf for i, token in enumerate(tokens))


@pytest.mark.parametrize("num_rows", [1, 9, 24])
def test_chunks_hold_whole_requests_bound_the_copies_and_change_nothing(monkeypatch, num_rows):
    inputs = make_inputs()
    sampler = RejectionSampler(vocab_size=VOCAB_SIZE)
    whole, copied = sampler(inputs), []

    def counted(logits, *args, **kwargs):
        copied.append(len(logits))
        return apply_cutoffs(logits, *args, **kwargs)

    monkeypatch.setattr(rejection_sampler, "CHUNK_ELEMENTS", num_rows * VOCAB_SIZE)
    monkeypatch.setattr(rejection_sampler, "apply_cutoffs", counted)
    assert equal(sampler(inputs), whole)
    assert sum(copied) == 24
    assert max(copied) <= max(num_rows, NUM_DRAFTS + 1)
    assert all(rows % (NUM_DRAFTS + 1) == 0 for rows in copied)


def test_requests_in_mid_prefill_and_padding_rows_pass_through_cut_offs():
    inputs = make_inputs()
    counts = torch.tensor([4, 0, 4, 0, 4, 0])
    kept = counts.repeat_interleave(4) > 0
    idx_mapping = inputs.idx_mapping.clone()
    idx_mapping[5] = -1
    sparse = replace(
        inputs,
        target_logits=inputs.target_logits[kept],
        expanded_idx_mapping=inputs.expanded_idx_mapping[kept],
        cu_num_logits=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        idx_mapping=idx_mapping,
    )
    sampler = RejectionSampler(vocab_size=VOCAB_SIZE)
    output, full = sampler(sparse), sampler(inputs)
    assert output.num_sampled[[1, 3, 5]].tolist() == [0, 0, 0]
    assert torch.equal(output.sampled[::2], full.sampled[::2])


def test_an_empty_batch_with_cut_offs_gives_empty_outputs():
    inputs = make_inputs()
    empty = replace(
        inputs,
        target_logits=inputs.target_logits[:0],
        draft_tokens=inputs.draft_tokens[:0],
        idx_mapping=inputs.idx_mapping[:0],
        cu_num_logits=inputs.cu_num_logits[:1],
        positions=inputs.positions[:0],
        expanded_idx_mapping=inputs.expanded_idx_mapping[:0],
    )
    output = RejectionSampler(vocab_size=VOCAB_SIZE)(empty)
    assert output.sampled.shape == (0, NUM_DRAFTS + 1)


def test_a_request_is_verified_the_same_with_and_without_neighbours_that_cut():
    inputs = make_inputs()
    alone = replace(inputs, has_cutoffs=False)
    sampler = RejectionSampler(vocab_size=VOCAB_SIZE)
    uncut = [b for b, slot in enumerate(SLOTS) if slot in (0, 5)]
    assert torch.equal(sampler(inputs).sampled[uncut], sampler(alone).sampled[uncut])


def test_an_unknown_method_is_refused_with_the_nearest_spelling():
    with pytest.raises(ConfigError, match="rejection_sample_method") as error:
        RejectionSampler("standrad", vocab_size=VOCAB_SIZE)
    assert "did you mean 'standard'" in str(error.value)


class Undeclared:
    """A rejection sampler from before caches were sharded."""


@pytest.mark.parametrize(
    ("sampler", "cache"),
    [
        (RejectionSampler(vocab_size=VOCAB_SIZE), make_cache(Shard(2, 1))),
        (Undeclared(), make_cache()),
        (Undeclared(), None),
    ],
)
def test_the_guard_lets_pass_what_a_sampler_accepts(sampler, cache):
    check_receives(sampler, cache)


def test_a_sampler_that_did_not_declare_it_never_receives_a_sharded_cache():
    with pytest.raises(InternalError, match="sharded") as error:
        check_receives(Undeclared(), make_cache(Shard(2, 0)))
    assert "Undeclared" in error.value.where
    assert "num_shards=2" in error.value.got
