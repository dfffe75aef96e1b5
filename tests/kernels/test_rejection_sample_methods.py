"""What methods `block` and `synthetic` promise, request by request, on the torch twin."""

from dataclasses import replace

import pytest
import torch
from cache_layouts import batch_of_candidates, in_layout
from verification_cases import (
    emitted,
    lay_out,
    make_cache,
    random_requests,
    with_cell,
    with_draft,
    with_target,
)

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels import rejection_sample
from specreg.kernels.common.view import CELL_EMPTY
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.ownership import Shard

NAN, INF = float("nan"), float("inf")
METHODS = ["block", "synthetic"]


def verify(batch, vocab_size, method):
    num_drafts = batch.draft_tokens.shape[1]
    rates = torch.tensor([0.9, 0.5, 0.4])[:num_drafts] if method == "synthetic" else None
    return rejection_sample(*batch, vocab_size=vocab_size, method=method, acceptance_rates=rates)


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", list(DraftLogitsLayout))
@pytest.mark.parametrize("closeness", [0.1, 1.0])
def test_with_one_draft_block_is_standard_token_for_token(layout, closeness):
    requests = random_requests(200, 700, 1, closeness=closeness)
    batch, columns = batch_of_candidates(requests, list(range(200)), num_drafts=1)
    batch = batch._replace(cache=in_layout(batch.cache, columns, layout))
    standard = rejection_sample(*batch, vocab_size=700)
    assert equal(verify(batch, 700, "block"), standard)
    assert set(standard.num_sampled.tolist()) == {1, 2}
    one_hot = batch._replace(cache=None)
    assert equal(verify(one_hot, 700, "block"), rejection_sample(*one_hot, vocab_size=700))


def test_block_keeps_more_drafts_than_standard():
    requests = random_requests(300, 200, 3, closeness=1.0)
    batch = lay_out(requests, list(range(300)))
    block, standard = verify(batch, 200, "block"), rejection_sample(*batch, vocab_size=200)
    assert block.num_sampled.float().mean() > standard.num_sampled.float().mean()


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_kept_drafts_then_one_token_then_padding(method):
    batch = lay_out(random_requests(40, 300), list(range(40)))
    sampled, num_sampled, num_nans = verify(batch, 300, method)
    assert set(num_sampled.tolist()) == {1, 2, 3, 4}
    for row, count, drafts in zip(
        sampled.tolist(), num_sampled.tolist(), batch.draft_tokens.tolist(), strict=True
    ):
        assert row[: count - 1] == drafts[: count - 1]
        assert 0 <= row[count - 1] < 300
        assert row[count:] == [-1] * (4 - count)
    assert not num_nans.any()


def test_a_greedy_request_keeps_argmaxes_in_block_and_takes_them_behind_rates_in_synthetic():
    requests = [replace(request, temperature=0.0) for request in random_requests(8, 300)]
    batch = lay_out(requests, list(range(8)))
    assert equal(verify(batch, 300, "block"), rejection_sample(*batch, vocab_size=300))
    argmax = batch.target_logits.argmax(1).view(8, 4)
    for tokens, largest in zip(emitted(verify(batch, 300, "synthetic")), argmax, strict=True):
        assert tokens[-1] == largest[len(tokens) - 1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("missing", [-1, 300, 10**12])
def test_a_missing_draft_ends_the_round_at_the_draft_before_it(missing, method):
    requests = [replace(r, temperature=1.0) for r in random_requests(30, 300, closeness=0.0)]
    batch = lay_out(requests, list(range(30)))
    for step in range(3):
        for b in range(30):
            batch = with_draft(batch, b, step, missing) if b % 3 == step else batch
    output = verify(batch, 300, method)
    most = torch.arange(30) % 3 + 1
    assert (output.num_sampled <= most).all()
    if method == "block":  # p = q: every prefix passes
        assert torch.equal(output.num_sampled.long(), most)


def test_an_empty_cell_ends_a_block_like_a_missing_draft():
    batch = lay_out([replace(r, temperature=1.0) for r in random_requests(9, 300)], list(range(9)))
    for step in range(3):
        view, missing = batch.cache, batch
        for b in range(9):
            view = with_cell(view, b, step, state=CELL_EMPTY)
            missing = with_draft(missing, b, step, -1)
        got = verify(batch._replace(cache=view), 300, "block")
        assert equal(got, verify(missing, 300, "block"))


def test_a_rank_that_does_not_own_a_request_keeps_no_draft_of_it_in_block():
    (request,) = random_requests(1, 300, closeness=0.0)
    batch = lay_out([request], [3], shard=Shard(2, 1))
    assert len(emitted(verify(batch, 300, "block"))[0]) == 4
    foreign = batch._replace(cache=make_cache(4, 3, 300, shard=Shard(2, 0)))
    assert len(emitted(verify(foreign, 300, "block"))[0]) == 1


def test_equal_distributions_keep_whole_blocks():
    requests = [replace(r, temperature=1.0) for r in random_requests(50, 1000, closeness=0.0)]
    batch = lay_out(requests, list(range(50)))
    assert verify(batch, 1000, "block").num_sampled.tolist() == [4] * 50


@pytest.mark.parametrize("method", METHODS)
def test_tokens_do_not_depend_on_slot_batch_row_or_batch_size(method):
    requests = random_requests(9, 1100)
    together = emitted(verify(lay_out(requests, [8, 3, 5, 0, 7, 1, 2, 6, 4]), 1100, method))
    backwards = emitted(verify(lay_out(requests[::-1], list(range(9))), 1100, method))
    assert backwards[::-1] == together
    for b, request in enumerate(requests):
        assert emitted(verify(lay_out([request], [0]), 1100, method)) == [together[b]]


@pytest.mark.parametrize("method", METHODS)
def test_chunks_of_any_size_give_equal_results(method, monkeypatch):
    batch = lay_out(random_requests(7, 1100), list(range(7)))
    whole = verify(batch, 1100, method)
    for rows in (1, 3):
        monkeypatch.setattr(rows_reference, "CHUNK_ELEMENTS", rows * 1100)
        assert equal(whole, verify(batch, 1100, method))


@pytest.mark.parametrize("method", METHODS)
def test_padding_prefill_and_plain_rows_are_as_in_standard(method):
    requests = random_requests(4, 60)
    requests[1] = replace(requests[1], target=requests[1].target[:0])
    requests[2] = replace(requests[2], target=requests[2].target[:1])
    batch = lay_out([*requests, None], [3, 0, 1, 2, -1])
    sampled, num_sampled, num_nans = verify(batch, 60, method)
    assert num_sampled[[1, 4]].tolist() == [0, 0]
    assert (sampled[[1, 4]] == -1).all()
    assert num_nans[[1, 4]].tolist() == [0, 0]
    assert torch.equal(sampled[2], rejection_sample(*batch, vocab_size=60).sampled[2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rows_that_are_no_numbers_are_counted_and_stay_in_the_vocabulary(
    value, temperature, method
):
    requests = [replace(r, temperature=temperature) for r in random_requests(6, 600)]
    batch = lay_out(requests, list(range(6)))
    clean = verify(batch, 600, method)
    for row in (4, 6, 13):
        batch = with_target(batch, row, torch.full((600,), value))
    output = verify(batch, 600, method)
    is_bad = int(value != INF)
    assert output.num_nans.tolist() == [0, 2 * is_bad, 0, is_bad, 0, 0]
    assert ((output.sampled >= -1) & (output.sampled < 600)).all()
    for b in (0, 2, 4, 5):
        assert torch.equal(output.sampled[b], clean.sampled[b])


@pytest.mark.parametrize("method", METHODS)
def test_tiny_temperatures_give_an_id_of_the_vocabulary(method):
    requests = [replace(r, temperature=1e-45) for r in random_requests(3, 300, scale=10.0)]
    batch = lay_out(requests, [0, 1, 2])
    for tokens in emitted(verify(batch, 300, method)):
        assert all(0 <= token < 300 for token in tokens)


def test_synthetic_accepts_at_the_given_rates_whatever_was_drafted():
    """Marginals within 5 sigma over 4,000 rounds; the token behind follows the target."""
    num_reqs = 4_000
    slots, ones = torch.arange(num_reqs), torch.ones(num_reqs)
    law = torch.tensor([0.05, 0.15, 0.25, 0.25, 0.30])
    rates = torch.tensor([0.9, 0.5, 0.2])
    output = rejection_sample(
        law.log().expand(4 * num_reqs, 5),
        torch.full((num_reqs, 3), 4),
        slots,
        torch.arange(num_reqs + 1) * 4,
        slots * 0 + 3,
        ones,
        slots,
        None,
        vocab_size=5,
        method="synthetic",
        acceptance_rates=rates,
    )
    for i, rate in enumerate(rates.tolist()):
        share = float((output.num_sampled > i + 1).double().mean())
        assert abs(share - rate) < 5 * (rate * (1 - rate) / num_reqs) ** 0.5
    last = output.sampled.gather(1, output.num_sampled.long()[:, None] - 1).squeeze(1)
    counts = torch.bincount(last, minlength=5).double()
    expected = law.double() * num_reqs
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5


@pytest.mark.parametrize(("rates", "count"), [([1.0, 1.0, 1.0], 4), ([0.0, 0.0, 0.0], 1)])
def test_synthetic_rates_of_1_and_0_are_exact(rates, count):
    batch = lay_out(random_requests(50, 40), list(range(50)))
    output = rejection_sample(
        *batch, vocab_size=40, method="synthetic", acceptance_rates=torch.tensor(rates)
    )
    assert output.num_sampled.tolist() == [count] * 50


@pytest.mark.parametrize(
    ("method", "rates", "message"),
    [
        ("standard", torch.ones(3), "with it alone"),
        ("block", torch.ones(3), "with it alone"),
        ("synthetic", None, "with it alone"),
        ("synthetic", torch.ones(2), r"allowed: float32 \[3\]"),
        ("synthetic", torch.ones(3, dtype=torch.float64), "float64"),
        ("synthetic", torch.ones(6)[::2], "contiguous"),
    ],
)
def test_rates_that_do_not_fit_are_refused(method, rates, message):
    batch = lay_out(random_requests(2, 40), [0, 1])
    with pytest.raises(TensorError, match=message):
        rejection_sample(*batch, vocab_size=40, method=method, acceptance_rates=rates)
