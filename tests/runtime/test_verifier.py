"""Verification by owner: each request's own parameters, on whatever rank, in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from specreg.kernels import shard_plan
from specreg.logprobs import LogprobsFormat, LogprobsQuery
from specreg.ownership import Shard
from specreg.rejection_sampler import RejectionSampler
from specreg.runtime import verifier as verifier_module
from specreg.runtime.slot_processors import SlotProcessors
from specreg.runtime.slot_state import SlotState
from specreg.runtime.step import Admission, ScheduledRow, encode_masks
from specreg.runtime.verifier import OwnedBatch, Verified, Verifier

V, K = 37, 3
MAX_NUM_SEQS = 9
SLOTS = [7, 2, 5, 0, 3, -1, 8, 4]
NUM_DRAFTS = [3, 0, 2, 3, 1, 0, 3, 3]


def admission(slot: int, **asks: Any) -> Admission:
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 100 + slot}
    return Admission(slot=slot, **{**own, **asks})


# Every request differs from every other in all that sampling reads.
ADMISSIONS = [
    admission(7, temperature=0.7, logit_bias=[[3, 2.0], [36, -5.0]]),
    admission(2, temperature=1.3, allowed_token_ids=[1, 4, 36], top_k=2),
    admission(5, temperature=0.9, penalties=[1.5, 0.2, 0.3], prompt_token_ids=[1, 2, 3]),
    admission(0, temperature=1.1, num_top_logprobs=4),
    admission(
        3,
        temperature=0.0,
        penalties=[0.7, 0.0, -1.0],
        prompt_token_ids=[9],
        output_token_ids=[4, 4],
        logprob_token_ids=[36, 0, 7],
        num_top_logprobs=0,
    ),
    admission(8, temperature=0.5, top_p=0.8, logit_bias=[[0, 1.0]], num_top_logprobs=2),
    admission(4, temperature=2.0),
]


def mask_of(*allowed_rows: range) -> str:
    return encode_masks([sum(1 << t for t in row).to_bytes(5, "little") for row in allowed_rows])


ROWS = [
    ScheduledRow(slot, 10, [1] * (1 + n), 1 + n, 0)
    for slot, n in zip(SLOTS, NUM_DRAFTS, strict=True)
    if slot >= 0
]
ROWS[-1].bitmasks = mask_of(range(20), range(5, 37), range(3), range(1, 9))


def whole_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, OwnedBatch]:
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor([0 if s < 0 else 1 + n for s, n in zip(SLOTS, NUM_DRAFTS, strict=True)])
    logits = 3 * torch.randn(int(counts.sum()), V, generator=generator)
    drafts = torch.full((len(SLOTS), K), -1)
    start = 0
    for b, n in enumerate(NUM_DRAFTS):
        if SLOTS[b] >= 0:
            # The likeliest tokens, so that some drafts are accepted.
            drafts[b, :n] = logits[start : start + n].argmax(1)
        start += int(counts[b])
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return logits.to(dtype), OwnedBatch(torch.tensor(SLOTS), cu, drafts, torch.arange(8) * 5 + 11)


def make_verifier(
    shard: Shard, admissions: Sequence[Admission], rows: Sequence[ScheduledRow] = ()
) -> Verifier:
    num_slots = max([MAX_NUM_SEQS, *(a.slot + 1 for a in admissions)])
    state = SlotState(num_slots, torch.device("cpu"))
    processors = SlotProcessors(V, torch.device("cpu"), shard)
    for each in admissions:
        state.admit(each)
        processors.admit(each)
    processors.begin(rows)
    return Verifier(RejectionSampler(vocab_size=V), state, processors, None, V)


LAYOUT = LogprobsFormat(4, 3)


def owned_part(
    logits: Tensor, batch: OwnedBatch, shard: Shard
) -> tuple[Tensor, OwnedBatch, Tensor]:
    """What arrives at a rank, and which requests these are."""
    plan = shard_plan(batch.idx_mapping, batch.cu_num_logits, shard)
    counts = plan.logits_per_rank.tolist()
    start = sum(counts[: shard.shard_idx])
    order = plan.order[start : start + counts[shard.shard_idx]]
    reqs = plan.local_reqs
    return (
        logits[order],
        OwnedBatch(
            plan.local_idx_mapping,
            plan.local_cu_num_logits,
            batch.draft_tokens[reqs],
            batch.positions[reqs],
        ),
        reqs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_shards", [2, 3, 4])
def test_owners_decide_what_one_rank_would_have_decided(
    num_shards: int, dtype: torch.dtype
) -> None:
    logits, batch = whole_batch(dtype)
    expected = make_verifier(Shard(), ADMISSIONS, ROWS)(logits, batch, LAYOUT)
    assert expected.num_sampled.unique().numel() > 2
    seen = 0
    for rank in range(num_shards):
        shard = Shard(num_shards, rank)
        own_logits, own_batch, reqs = owned_part(logits, batch, shard)
        actual = make_verifier(shard, ADMISSIONS, ROWS)(own_logits, own_batch, LAYOUT)
        for name, mine, all_of_them in zip(Verified._fields, actual, expected, strict=True):
            assert torch.equal(mine, all_of_them[reqs]), name
        seen += len(reqs)
    assert seen == len(ADMISSIONS)


def test_a_request_without_processors_is_decided_as_if_nobody_had_any() -> None:
    logits, batch = whole_batch(torch.bfloat16)
    plain = [admission(a.slot, temperature=a.temperature, top_k=a.top_k) for a in ADMISSIONS]
    alone = make_verifier(Shard(), plain)(logits, batch, None)
    before = logits.clone()
    together = make_verifier(Shard(), ADMISSIONS, ROWS)(logits, batch, LAYOUT)
    row = SLOTS.index(0)
    assert torch.equal(together.sampled[row], alone.sampled[row])
    assert torch.equal(logits, before)
    changed = [row for row, slot in enumerate(SLOTS) if slot not in (0, -1)]
    assert not torch.equal(together.sampled[changed], alone.sampled[changed])


def test_processed_requests_in_chunks_are_decided_as_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, batch = whole_batch()
    verify = make_verifier(Shard(), ADMISSIONS, ROWS)
    whole = verify(logits, batch, LAYOUT)
    for num_rows in (1, 5):
        monkeypatch.setattr(verifier_module, "CHUNK_ELEMENTS", num_rows * V)
        for name, piece, expected in zip(
            Verified._fields, verify(logits, batch, LAYOUT), whole, strict=True
        ):
            assert torch.equal(piece, expected), name


def test_log_probabilities_are_of_the_raw_logits_and_of_the_emitted_tokens() -> None:
    logits, batch = whole_batch()
    verified = make_verifier(Shard(), ADMISSIONS, ROWS)(logits, batch, LAYOUT)
    packed = verified.logprobs.view(len(SLOTS), K + 1, LAYOUT.width)
    for slot, query in ((0, LogprobsQuery(4)), (3, LogprobsQuery(0, (36, 0, 7)))):
        b = SLOTS.index(slot)
        tokens = verified.sampled[b, : int(verified.num_sampled[b])].tolist()
        raw = logits[int(batch.cu_num_logits[b]) :].log_softmax(1)
        for i, entry in enumerate(LAYOUT.unpack(packed[b], tokens, query)):
            assert entry.logprob == pytest.approx(float(raw[i, tokens[i]]), abs=1e-5)
            for token, value in entry.top + entry.asked:
                assert value == pytest.approx(float(raw[i, token]), abs=1e-5)
    assert not packed[SLOTS.index(2)].any()  # it asks for nothing


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), -torch.inf])
@pytest.mark.parametrize("num_accepted", [0, 2])
def test_a_row_with_nothing_usable_is_told_and_its_neighbours_are_untouched(
    poison: float, num_accepted: int, temperature: float
) -> None:
    logits, batch = whole_batch()
    admissions = [admission(s, temperature=temperature) for s in SLOTS if s >= 0]
    b, first = SLOTS.index(0), int(batch.cu_num_logits[SLOTS.index(0)])
    # Rows that leave no choice but the draft, up to the poisoned one; there the draft is token 0,
    # which a row without anything gives: a greedy draft of 0 would be accepted.
    batch.draft_tokens[b] = torch.tensor([4, 4, 0] if num_accepted else [0, 4, 4])
    logits[first : first + num_accepted, 4] = 1000.0
    clean = make_verifier(Shard(), admissions)(logits, batch, None)
    assert torch.equal(clean.num_usable, clean.num_sampled)
    logits[first + num_accepted] = poison
    verified = make_verifier(Shard(), admissions)(logits, batch, None)
    assert int(verified.num_usable[b]) == num_accepted < int(verified.num_sampled[b])
    assert verified.sampled[b, :num_accepted].tolist() == [4] * num_accepted
    assert verified.num_nans.tolist() == [int(row == b) for row in range(len(SLOTS))]
    assert int(verified.sampled.max()) < V
    others = [row for row in range(len(SLOTS)) if row != b]
    for poisoned, untouched in zip(verified, clean, strict=True):
        assert torch.equal(poisoned[others], untouched[others])


def test_one_nan_in_a_fine_row_is_counted_and_the_request_goes_on() -> None:
    logits, batch = whole_batch()
    b = SLOTS.index(4)
    logits[int(batch.cu_num_logits[b]), 11] = float("nan")
    verified = make_verifier(Shard(), ADMISSIONS)(logits, batch, None)
    assert int(verified.num_nans[b]) == 1
    assert torch.equal(verified.num_usable, verified.num_sampled)


def test_a_mask_that_allows_nothing_leaves_nothing_usable() -> None:
    logits, batch = whole_batch()
    rows = [ScheduledRow(4, 10, [1] * 4, 4, 0, bitmasks=mask_of(*[range(0)] * 4))]
    verified = make_verifier(Shard(), ADMISSIONS, rows)(logits, batch, None)
    assert int(verified.num_usable[SLOTS.index(4)]) == 0
    assert torch.equal(verified.num_usable[:-1], verified.num_sampled[:-1])


def test_a_rank_that_owns_nothing_decides_nothing() -> None:
    batch = OwnedBatch(
        torch.empty(0, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        torch.empty(0, K, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
    )
    verified = make_verifier(Shard(2, 1), ADMISSIONS, ROWS)(torch.empty(0, V), batch, LAYOUT)
    assert [tuple(tensor.shape) for tensor in verified] == [
        (0, K + 1),
        (0,),
        (0,),
        (0,),
        (0, (K + 1) * LAYOUT.width),
    ]


NUM_DRAWS = 4000


def law_of_row(logits: Tensor, row: int) -> Tensor:
    """The distribution of a request whose first draft is 5, worked out by hand."""
    changed = logits[row].double()
    changed[2] += 1.5
    changed[7] -= 0.5 + 0.25  # emitted before, once
    if row == 1:
        changed[5] -= 0.5 + 0.25  # the draft
    changed[12:] = -torch.inf
    return (changed / 0.8).softmax(0)[:12]


def test_emitted_tokens_follow_the_processed_distribution_given_the_drafts_before_them() -> None:
    """4000 requests with one draft. Chi-square of both positions; p > 1e-3 (about 3.3 sigma).

    A second row that does not count the draft before it scores p < 1e-30.
    """
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, V, generator=generator)
    logits[0, 5] = logits[:, :12].amax() + 1.0
    logits[1, 5] = logits[:, :12].amax() + 0.5
    asks: dict[str, Any] = {
        "temperature": 0.8,
        "penalties": [1.0, 0.5, 0.25],
        "prompt_token_ids": [3],
        "output_token_ids": [7],
        "logit_bias": [[2, 1.5]],
        "allowed_token_ids": list(range(12)),
    }
    admissions = [admission(slot, **asks) for slot in range(NUM_DRAWS)]
    batch = OwnedBatch(
        torch.arange(NUM_DRAWS),
        2 * torch.arange(NUM_DRAWS + 1),
        torch.full((NUM_DRAWS, 1), 5),
        torch.full((NUM_DRAWS,), 20),
    )
    verified = make_verifier(Shard(), admissions)(logits.repeat(NUM_DRAWS, 1), batch, None)
    first = verified.sampled[:, 0]
    second = verified.sampled[:, 1][verified.num_sampled == 2]
    assert torch.equal(verified.num_sampled == 2, first == 5)
    assert len(second) > 500
    laws = [law_of_row(logits, row) for row in range(2)]
    pvalues = [
        stats.chisquare(torch.bincount(tokens, minlength=12), law * len(tokens)).pvalue
        for tokens, law in zip((first, second), laws, strict=True)
    ]
    assert min(pvalues) > 1e-3
    blind = logits.clone()
    blind[1, 5] += 0.5 + 0.25
    counts = torch.bincount(second, minlength=12)
    assert stats.chisquare(counts, law_of_row(blind, 1) * len(second)).pvalue < 1e-30
