"""`rejection_sample` in the interpreter against its twin; scratch and outputs are poisoned."""

from dataclasses import replace

import pytest
import torch
from verification_cases import (
    Request,
    lay_out,
    make_cache,
    random_requests,
    with_cell,
    with_draft,
    with_target,
)

from specreg.kernels.common.view import CELL_BARE, CELL_EMPTY
from specreg.kernels.rejection_sample import kernel, prepare
from specreg.kernels.rejection_sample.batch import RejectionBatch
from specreg.kernels.rejection_sample.reference import rejection_sample_reference
from specreg.ownership import Shard

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def agree(batch, vocab_size):
    """Run kernel and twin and compare every output."""
    checked = RejectionBatch(*batch, vocab_size=vocab_size)
    output = kernel.rejection_sample_triton(checked)
    twin = rejection_sample_reference(checked)
    for got, expected in zip(output, twin, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    return output


@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, torch.float32),
        (7, torch.bfloat16),
        (513, torch.float32),
        (513, torch.float16),
        (3000, torch.bfloat16),
    ],
)
def test_mixed_batches_agree(vocab_size, with_cache, dtype):
    """Greedy and sampled requests, one without drafts, one in mid-prefill, one padding row."""
    requests = random_requests(6, vocab_size, dtype=dtype)
    requests[2] = replace(requests[2], target=requests[2].target[:1])
    requests[4] = replace(requests[4], target=requests[4].target[:0])
    slots = [3, 0, 5, 1, 2, 4]
    batch = lay_out([*requests, None], [*slots, -1], with_cache=with_cache)
    output = agree(batch, vocab_size)
    assert output.num_sampled[[4, 6]].tolist() == [0, 0]


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_rounds_of_any_length_agree(num_drafts):
    requests = random_requests(4, 700, num_drafts, closeness=0.2)
    agree(lay_out(requests, [2, 0, 1, 3], num_drafts=num_drafts), 700)


@pytest.mark.parametrize("num_shards", [2, 3])
def test_every_rank_reads_its_own_rows(num_shards):
    requests = random_requests(4, 90, closeness=0.2)
    for rank in range(num_shards):
        shard = Shard(num_shards, rank)
        slots = [slot for slot in range(4 * num_shards) if shard.owns(slot)]
        batch = lay_out(requests, slots, shard=shard)
        agree(batch, 90)
        foreign = make_cache(
            7 * num_shards, 3, 90, shard=Shard(num_shards, (rank + 1) % num_shards)
        )
        agree(batch._replace(cache=foreign), 90)


@pytest.mark.parametrize("with_cache", [True, False])
def test_drafts_without_a_distribution_agree(with_cache):
    requests = random_requests(6, 300, closeness=0.0)
    batch = lay_out(requests, list(range(6)), with_cache=with_cache)
    batch = with_draft(with_draft(batch, 0, 0, -1), 1, 2, 300)
    if with_cache:
        view = with_cell(batch.cache, 2, 1, state=CELL_EMPTY)
        view = with_cell(view, 4, 0, state=CELL_BARE)
        view = with_cell(view, 5, 1, temperature=0.0)
        batch = batch._replace(cache=view)
    agree(batch, 300)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_values_that_are_no_numbers_agree(value, temperature):
    requests = [replace(r, temperature=temperature) for r in random_requests(4, 600)]
    batch = lay_out(requests, [0, 1, 2, 3])
    row = batch.target_logits[4].clone()
    row[[3, 599]] = value
    batch = with_target(batch, 4, row)
    output = agree(with_target(batch, 8, torch.full((600,), value)), 600)
    is_nan, is_empty = int(value != value), int(value != INF)
    assert output.num_nans.tolist() == [0, is_nan, is_empty, 0]
    cell = batch.cache.logits.clone()
    cell[1, 0, :300] = value
    agree(batch._replace(cache=replace(batch.cache, logits=cell)), 600)


def test_ties_go_to_the_lowest_id_and_tails_are_never_drawn():
    target = torch.full((2, 1100), -INF)
    target[:, [600, 601, 1000]] = 2.0
    target[:, 1050:] = 99.0  # columns that are no tokens
    draft = torch.full((1, 1050), -INF)
    draft[0, 600:700] = 0.0
    requests = [
        Request(target, draft, temperature, seed) for temperature in (0.0, 1.0) for seed in range(4)
    ]
    for with_cache in (True, False):
        batch = lay_out(requests, list(range(8)), num_drafts=1, with_cache=with_cache)
        sampled = agree(batch, 1050).sampled
        assert set(sampled.flatten().tolist()) <= {-1, 600, 601, 1000}
        assert sampled[0, 0] == 600


def test_a_certain_target_and_equal_distributions_agree():
    certain = torch.full((2, 40), -INF)
    certain[:, 9] = 1.0
    requests = [Request(certain, torch.zeros(1, 40), seed=seed) for seed in range(6)]
    assert (agree(lay_out(requests, list(range(6)), num_drafts=1), 40).sampled[:, 0] == 9).all()
    equal = random_requests(6, 800, closeness=0.0)
    agree(lay_out(equal, list(range(6))), 800)


def test_parts_of_a_batch_agree_with_the_whole(monkeypatch):
    batch = lay_out(random_requests(5, 600), list(range(5)))
    whole = agree(batch, 600)
    monkeypatch.setattr(prepare, "REQUESTS_AT_ONCE", 2)  # two requests at a time
    parts = agree(batch, 600)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_an_empty_batch_launches_nothing():
    batch = lay_out(random_requests(1, 40), [0])
    empty = batch._replace(
        target_logits=batch.target_logits[:0],
        draft_tokens=batch.draft_tokens[:0],
        idx_mapping=batch.idx_mapping[:0],
        cu_num_logits=batch.cu_num_logits[:1],
        positions=batch.positions[:0],
    )
    assert agree(empty, 40).sampled.shape == (0, 4)


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
    expected = agree(batch, 50)
    got = agree(batch._replace(**around, draft_tokens=drafts[:, 2:5]), 50)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
