"""What `rejection_sample` promises, request by request, on the torch twin."""

from dataclasses import replace

import pytest
import torch
from verification_cases import (
    Request,
    emitted,
    lay_out,
    make_cache,
    random_requests,
    with_cell,
    with_draft,
    with_target,
)

from specreg.errors import TensorError
from specreg.kernels import rejection_sample
from specreg.kernels.common.view import CELL_BARE, CELL_EMPTY
from specreg.kernels.rejection_sample import reference
from specreg.kernels.rejection_sample.batch import RejectionBatch
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.kernels.shard_plan.op import shard_plan
from specreg.ownership import Shard

NAN, INF = float("nan"), float("inf")


def verify(batch, vocab_size):
    return rejection_sample(*batch, vocab_size=vocab_size)


def test_outputs_are_accepted_drafts_then_one_token_then_padding():
    requests = random_requests(24, 600)
    batch = lay_out(requests, list(range(24)))
    sampled, num_sampled, num_nans = verify(batch, 600)
    assert (sampled.dtype, num_sampled.dtype, num_nans.dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )
    assert set(num_sampled.tolist()) == {1, 2, 3, 4}
    for row, count, drafts in zip(
        sampled.tolist(), num_sampled.tolist(), batch.draft_tokens.tolist(), strict=True
    ):
        assert row[: count - 1] == drafts[: count - 1]
        assert 0 <= row[count - 1] < 600
        assert row[count:] == [-1] * (4 - count)
    assert not num_nans.any()


def test_a_greedy_request_keeps_drafts_while_they_are_the_argmax():
    target = torch.tensor([[0.0, 5, 1, 2], [3, 0, 0, 0], [0, 0, 0, 9], [0, 7, 0, 0]])
    request = Request(target, target[:-1], temperature=0.0)
    batch = lay_out([request], [0])
    assert batch.draft_tokens.tolist() == [[1, 0, 3]]
    assert emitted(verify(batch, 4)) == [[1, 0, 3, 1]]
    assert emitted(verify(with_draft(batch, 0, 1, 2), 4)) == [[1, 0]]


def test_ties_of_the_argmax_go_to_the_lowest_id_across_blocks():
    target = torch.zeros(2, 1500)
    target[:, [700, 1400]] = 5.0
    batch = lay_out([Request(target, target[:1], 0.0)], [0], num_drafts=1)
    assert emitted(verify(batch, 1500)) == [[700, 700]]
    assert emitted(verify(with_draft(batch, 0, 0, 1400), 1500)) == [[700]]


def test_a_request_without_logits_rows_and_a_padding_row_emit_nothing():
    requests = random_requests(3, 40)
    prefill = replace(requests[1], target=requests[1].target[:0], draft=requests[1].draft[:0])
    batch = lay_out([requests[0], prefill, None, requests[2]], [2, 0, -1, 1])
    sampled, num_sampled, num_nans = verify(batch, 40)
    assert num_sampled[1:3].tolist() == [0, 0]
    assert num_nans[1:3].tolist() == [0, 0]
    assert (sampled[1:3] == -1).all()
    alone = lay_out([requests[0], requests[2]], [2, 1])
    assert emitted(verify(alone, 40)) == [
        emitted((sampled, num_sampled, num_nans))[i] for i in (0, 3)
    ]


def test_a_padding_row_with_logits_rows_stays_inert():
    requests = random_requests(2, 40)
    batch = lay_out(requests, [1, 0])
    padded = batch._replace(idx_mapping=torch.tensor([-1, 0]))
    sampled, num_sampled, _ = verify(padded, 40)
    assert sampled[0].tolist() == [-1] * 4
    assert num_sampled[0] == 0
    assert torch.equal(sampled[1], verify(batch, 40).sampled[1])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_empty_batch_gives_empty_outputs(num_drafts):
    batch = lay_out(random_requests(1, 40, num_drafts), [0], num_drafts=num_drafts)
    empty = batch._replace(
        target_logits=batch.target_logits[:0],
        draft_tokens=batch.draft_tokens[:0],
        idx_mapping=batch.idx_mapping[:0],
        cu_num_logits=batch.cu_num_logits[:1],
        positions=batch.positions[:0],
    )
    sampled, num_sampled, num_nans = verify(empty, 40)
    assert sampled.shape == (0, num_drafts + 1)
    assert num_sampled.shape == num_nans.shape == (0,)


def test_one_row_is_a_plain_draw_with_or_without_room_for_drafts():
    (request,) = random_requests(1, 700, 0)
    without_room = verify(lay_out([request], [0], num_drafts=0, with_cache=False), 700)
    with_room = verify(lay_out([request], [0], num_drafts=3), 700)
    assert without_room.sampled.shape == (1, 1)
    assert emitted(without_room) == emitted(with_room)


@pytest.mark.parametrize("missing", [-1, -7, 4, 10**12])
def test_a_draft_that_is_no_token_ends_the_round_and_is_replaced_from_the_target(missing):
    (request,) = random_requests(1, 4, 5, closeness=0.0)
    batch = lay_out([request], [0], num_drafts=5)
    assert len(emitted(verify(batch, 4))[0]) == 6  # draft and target agree: all are accepted
    for step in range(5):
        tokens = emitted(verify(with_draft(batch, 0, step, missing), 4))[0]
        assert len(tokens) == step + 1
        assert all(0 <= token < 4 for token in tokens)


def test_the_count_of_emitted_tokens_never_exceeds_the_real_drafts_and_one():
    (request,) = random_requests(1, 4, 5, closeness=0.0)
    drafts = torch.tensor([[1, 0, 1, -1, -1]])
    requests = [replace(request, seed=seed) for seed in range(50)]
    batch = lay_out(requests, list(range(50)), num_drafts=5)
    for tokens in emitted(verify(batch._replace(draft_tokens=drafts.repeat(50, 1)), 4)):
        assert 1 <= len(tokens) <= 4
        assert -1 not in tokens


@pytest.mark.parametrize("state", [CELL_EMPTY, CELL_BARE])
def test_a_cell_that_is_not_stored_counts_as_a_missing_draft(state):
    requests = random_requests(8, 300, closeness=0.0)
    batch = lay_out(requests, list(range(8)))
    for step in range(3):
        view = batch.cache
        for row in range(8):
            view = with_cell(view, row, step, state=state)
        without_cell = verify(batch._replace(cache=view), 300)
        missing = batch
        for b in range(8):
            missing = with_draft(missing, b, step, -1)
        without_draft = verify(missing, 300)
        for b, request in enumerate(requests):
            if request.temperature:  # a greedy request needs no distribution
                assert emitted(without_cell)[b] == emitted(without_draft)[b]


def test_a_rank_that_does_not_own_a_request_has_no_distribution_for_its_drafts():
    (request,) = random_requests(1, 300, closeness=0.0)
    batch = lay_out([request], [3], shard=Shard(2, 1))
    foreign = batch._replace(cache=make_cache(4, 3, 300, shard=Shard(2, 0)))
    assert len(emitted(verify(batch, 300))[0]) == 4
    assert len(emitted(verify(foreign, 300))[0]) == 1


def test_a_draft_whose_cell_gives_it_probability_0_is_not_taken_for_a_draw_from_it():
    request = Request(torch.zeros(2, 3), torch.zeros(1, 3))
    batch = lay_out([request], [0], num_drafts=1)
    for poison in (-INF, NAN):
        cell = batch.cache.logits.clone()
        cell[0, 0, batch.draft_tokens[0, 0]] = poison
        assert (
            len(emitted(verify(batch._replace(cache=replace(batch.cache, logits=cell)), 3))[0]) == 1
        )


def test_more_rows_than_drafts_have_room_for_are_ignored():
    (request,) = random_requests(1, 50, 2, closeness=0.0)
    batch = lay_out([request], [0], num_drafts=2)
    longer = batch._replace(
        target_logits=torch.cat([batch.target_logits, torch.full((3, 50), NAN)]),
        cu_num_logits=batch.cu_num_logits + torch.tensor([0, 3], dtype=torch.int32),
    )
    expected, got = verify(batch, 50), verify(longer, 50)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 10_000, 8193])
def test_a_row_of_nan_gives_an_id_of_the_vocabulary_and_is_counted_once(vocab_size, temperature):
    requests = [
        replace(request, temperature=temperature) for request in random_requests(3, vocab_size, 0)
    ]
    batch = lay_out(requests, [0, 1, 2], num_drafts=0, with_cache=False)
    poisoned = verify(with_target(batch, 1, torch.full((vocab_size,), NAN)), vocab_size)
    assert poisoned.num_nans.tolist() == [0, 1, 0]
    assert poisoned.sampled[1].item() == 0
    clean = verify(batch, vocab_size)
    assert torch.equal(poisoned.sampled[[0, 2]], clean.sampled[[0, 2]])


def test_rows_behind_a_rejection_are_counted_too():
    (request,) = random_requests(1, 300)
    batch = with_draft(lay_out([request], [0]), 0, 0, -1)
    poisoned = batch.target_logits.clone()
    poisoned[1:, 7] = NAN
    poisoned[3] = -INF
    output = verify(batch._replace(target_logits=poisoned), 300)
    assert output.num_sampled.item() == 1
    assert output.num_nans.item() == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_nan_in_a_row_counts_as_minus_infinity(temperature):
    logits = torch.tensor([[1.0, 9.0, 0.0]])
    request = Request(logits, logits[:0], temperature)
    for seed in range(20):
        batch = lay_out([replace(request, seed=seed)], [0], num_drafts=0, with_cache=False)
        nan = verify(with_target(batch, 0, torch.tensor([1.0, NAN, 0.0])), 3)
        gone = verify(with_target(batch, 0, torch.tensor([1.0, -INF, 0.0])), 3)
        assert torch.equal(nan.sampled, gone.sampled)
        assert nan.sampled.item() != 1
        assert (nan.num_nans.item(), gone.num_nans.item()) == (1, 0)


def test_infinite_logits_take_all_the_mass():
    logits = torch.tensor([[0.0, INF, 5.0, INF]])
    for temperature in (0.5, 1.0, 2.0):
        request = Request(logits, logits[:0], temperature)
        batch = lay_out([request] * 40, list(range(40)), num_drafts=0, with_cache=False)
        batch = batch._replace(seeds=torch.arange(40))
        assert set(verify(batch, 4).sampled.flatten().tolist()) == {1, 3}


def test_nan_in_the_draft_cache_alone_leaves_the_target_distribution_in_place():
    (request,) = random_requests(1, 600, 1)
    batch = lay_out([request], [0], num_drafts=1)
    cell = torch.full_like(batch.cache.logits, NAN)
    output = verify(batch._replace(cache=replace(batch.cache, logits=cell)), 600)
    assert emitted(output) == emitted(verify(with_draft(batch, 0, 0, -1), 600))
    assert output.num_nans.item() == 0


@pytest.mark.parametrize("vocab_size", [8193, 10_000, 151_936])
def test_padding_lanes_and_tails_of_minus_infinity_are_never_drawn(vocab_size):
    target = torch.full((2, vocab_size + 3), -INF)
    target[:, :5] = torch.arange(5.0)
    target[:, vocab_size:] = 99.0  # columns that are no tokens
    draft = torch.full((1, vocab_size), -INF)
    draft[:, 2:9] = 0.0
    for temperature in (0.0, 1.0):
        request = Request(target, draft, temperature)
        requests = [replace(request, seed=seed) for seed in range(4)]
        for with_cache in (True, False):
            batch = lay_out(requests, list(range(4)), num_drafts=1, with_cache=with_cache)
            tokens = {token for row in emitted(verify(batch, vocab_size)) for token in row}
            assert tokens <= {0, 1, 2, 3, 4}


def test_a_target_that_allows_one_token_emits_it_whatever_was_drafted():
    target = torch.full((2, 700), -INF)
    target[:, 650] = -3.0
    for with_cache in (True, False):
        requests = [Request(target, torch.zeros(1, 700), seed=seed) for seed in range(40)]
        batch = lay_out(requests, list(range(40)), num_drafts=1, with_cache=with_cache)
        batch = with_draft(batch, 5, 0, 650)
        assert {token for row in emitted(verify(batch, 700)) for token in row} == {650}


def test_equal_distributions_accept_and_their_empty_residual_falls_back_to_the_target(monkeypatch):
    requests = random_requests(16, 1000, closeness=0.0)
    requests = [replace(request, temperature=1.0) for request in requests]
    batch = lay_out(requests, list(range(16)))
    assert verify(batch, 1000).num_sampled.tolist() == [4] * 16
    monkeypatch.setattr(reference, "passes", lambda log_u, chance: log_u > INF)
    rejected = verify(batch, 1000)
    assert rejected.num_sampled.tolist() == [1] * 16
    missing = verify(batch._replace(draft_tokens=batch.draft_tokens * 0 - 1), 1000)
    assert torch.equal(rejected.sampled, missing.sampled)


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-38, 1e-45])
def test_tiny_temperatures_give_the_argmax_and_disturb_no_neighbour(temperature):
    requests = random_requests(6, 900, scale=10.0)
    requests = [replace(request, temperature=1.0) for request in requests]
    batch = lay_out(requests, list(range(6)))
    cold = batch.temperature.clone()
    cold[2] = temperature
    output, neighbours = verify(batch._replace(temperature=cold), 900), verify(batch, 900)
    rows = batch.target_logits[8:12].argmax(1).tolist()
    tokens = emitted(output)[2]
    assert tokens == rows[: len(tokens)]
    others = [0, 1, 3, 4, 5]
    assert [emitted(output)[b] for b in others] == [emitted(neighbours)[b] for b in others]


def test_a_temperature_of_nan_gives_an_id_of_the_vocabulary():
    (request,) = random_requests(1, 700)
    batch = lay_out([request], [0])
    tokens = emitted(verify(batch._replace(temperature=torch.tensor([NAN])), 700))[0]
    assert all(0 <= token < 700 for token in tokens)


def test_drafts_at_a_tiny_temperature_are_verified_without_a_distribution_rather_than_wrongly():
    (request,) = random_requests(1, 900)
    tokens = emitted(verify(lay_out([replace(request, drafted_at=1e-45)], [0]), 900))[0]
    assert all(0 <= token < 900 for token in tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_do_not_depend_on_slot_batch_row_or_batch_size(dtype):
    requests = random_requests(9, 1100, dtype=dtype)
    together = emitted(verify(lay_out(requests, [8, 3, 5, 0, 7, 1, 2, 6, 4]), 1100))
    backwards = emitted(verify(lay_out(requests[::-1], list(range(9))), 1100))
    assert backwards[::-1] == together
    for b, request in enumerate(requests):
        assert emitted(verify(lay_out([request], [0]), 1100)) == [together[b]]
    assert len({len(tokens) for tokens in together}) > 1


@pytest.mark.parametrize("num_threads", [1, 3])
def test_tokens_do_not_depend_on_the_batch_at_a_real_vocabulary(num_threads):
    requests = random_requests(5, 49_152, 2, closeness=0.8)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = verify(lay_out(requests, list(range(5)), num_drafts=2), 49_152)
        for b, request in enumerate(requests):
            alone = verify(lay_out([request], [0], num_drafts=2), 49_152)
            assert emitted(alone) == [emitted(together)[b]]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_ranks_that_verify_what_they_own_emit_what_one_rank_emits(num_shards):
    requests = random_requests(9, 300)
    slots = [8, 3, 5, 0, 7, 1, 2, 6, 4]
    whole = lay_out(requests, slots, max_num_seqs=9)
    ranks = []
    for rank in range(num_shards):
        shard = Shard(num_shards, rank)
        plan = shard_plan(whole.idx_mapping, whole.cu_num_logits, shard)
        rows = plan.order.split(plan.logits_per_rank.tolist())[rank]
        local = whole._replace(
            target_logits=whole.target_logits[rows],
            draft_tokens=whole.draft_tokens[plan.local_reqs],
            idx_mapping=plan.local_idx_mapping,
            cu_num_logits=plan.local_cu_num_logits,
            positions=whole.positions[plan.local_reqs],
            cache=lay_out(requests, slots, max_num_seqs=9, shard=shard).cache,
        )
        ranks.append(verify(local, 300))
    for name in ("sampled", "num_sampled", "num_nans"):
        gathered = torch.cat([getattr(output, name) for output in ranks])
        assert torch.equal(gathered[plan.restore], getattr(verify(whole, 300), name))


def test_tokens_do_not_depend_on_the_storage_of_the_cache():
    requests = random_requests(4, 300)
    batch = lay_out(requests, [0, 1, 2, 3])
    wide = torch.full((4, 3, 310), NAN)
    wide[..., :300] = batch.cache.logits
    view = replace(batch.cache, logits=wide[..., :300])
    assert emitted(verify(batch._replace(cache=view), 300)) == emitted(verify(batch, 300))


def test_what_lies_around_the_index_tensors_is_not_read():
    batch = lay_out(random_requests(3, 50), [2, 0, 1])
    around = {}
    for name in ("idx_mapping", "cu_num_logits", "positions"):
        values = getattr(batch, name)
        poisoned = values.new_full((len(values) + 2,), -(10**9))
        poisoned[1:-1] = values
        around[name] = poisoned[1:-1]
    drafts = torch.full((3, 8), 10**9)
    drafts[:, 2:5] = batch.draft_tokens
    poisoned = batch._replace(**around, draft_tokens=drafts[:, 2:5])
    expected, got = verify(batch, 50), verify(poisoned, 50)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_offsets_may_start_behind_rows_of_other_requests():
    requests = random_requests(4, 60)
    batch = lay_out(requests, [0, 1, 2, 3])
    tail = batch._replace(
        draft_tokens=batch.draft_tokens[2:],
        idx_mapping=batch.idx_mapping[2:],
        cu_num_logits=batch.cu_num_logits[2:],
        positions=batch.positions[2:],
    )
    assert emitted(verify(tail, 60)) == emitted(verify(batch, 60))[2:]


def test_chunks_of_any_size_give_equal_results_and_bound_the_scratch(monkeypatch):
    requests = random_requests(7, 1100)
    batch = lay_out(requests, list(range(7)))
    whole = verify(batch, 1100)
    sizes = []
    cut = rows_reference.Blocks.cut.__func__

    def counted(cls, logits):
        sizes.append(logits.numel())
        return cut(cls, logits)

    monkeypatch.setattr(rows_reference.Blocks, "cut", classmethod(counted))
    for rows in (1, 3, 7):
        sizes.clear()
        monkeypatch.setattr(rows_reference, "CHUNK_ELEMENTS", rows * 1100)
        chunked = verify(batch, 1100)
        assert all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))
        assert max(sizes) <= rows * 1100


def test_inputs_are_left_alone():
    batch = lay_out(random_requests(5, 400), list(range(5)))
    before = [tensor.clone() for tensor in batch[:-1]]
    cells = [
        getattr(batch.cache, n).clone() for n in ("logits", "temperature", "logsumexp", "state")
    ]
    verify(batch, 400)
    assert all(torch.equal(a, b) for a, b in zip(before, batch[:-1], strict=True))
    for name, cell in zip(("logits", "temperature", "logsumexp", "state"), cells, strict=True):
        assert torch.equal(getattr(batch.cache, name), cell)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target_logits", torch.zeros(8, 40, dtype=torch.float64), "target_logits"),
        ("target_logits", torch.zeros(8, 39), "do not span the vocabulary"),
        ("target_logits", torch.zeros(40, 8).T, "stride 1 between columns"),
        ("target_logits", torch.zeros(7, 40), "out of order"),
        ("draft_tokens", torch.zeros(2, 3, dtype=torch.int32), "draft_tokens"),
        ("draft_tokens", torch.zeros(3, 3, dtype=torch.int64), "draft_tokens"),
        ("draft_tokens", torch.zeros(3, 2, dtype=torch.int64).T, "stride 1 in a row"),
        ("draft_tokens", torch.zeros(2, 4, dtype=torch.int64), "no cell for some drafts"),
        ("idx_mapping", torch.zeros(2, dtype=torch.int32), "idx_mapping"),
        ("idx_mapping", torch.tensor([0, 2]), "has no slot"),
        ("cu_num_logits", torch.tensor([0, 4]), "cu_num_logits"),
        ("cu_num_logits", torch.tensor([0, 5, 4]), "out of order"),
        ("positions", torch.zeros(2), "positions"),
        ("positions", torch.zeros(4, dtype=torch.int64)[::2], "contiguous"),
        ("temperature", torch.ones(2, dtype=torch.bfloat16), "temperature"),
        ("seeds", torch.zeros(3, dtype=torch.int64), "temperature"),
        ("cache", make_cache(2, 3, 41), "41 columns"),
        ("cache", make_cache(1, 3, 40), "no row for some slots"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_read(field, value, message):
    batch = lay_out(random_requests(2, 40), [0, 1])
    with pytest.raises(TensorError, match=message):
        verify(batch._replace(**{field: value}), 40)


def test_an_unknown_method_is_refused_with_the_known_ones():
    batch = lay_out(random_requests(1, 40), [0])
    with pytest.raises(TensorError, match="standard"):
        rejection_sample(*batch, vocab_size=40, method="standrad")


def test_the_twin_is_what_runs_on_the_host():
    batch = lay_out(random_requests(3, 40), [0, 1, 2])
    direct = reference.rejection_sample_reference(RejectionBatch(*batch, vocab_size=40))
    assert all(torch.equal(a, b) for a, b in zip(verify(batch, 40), direct, strict=True))
