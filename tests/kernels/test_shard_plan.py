"""The plan of batch-sharded sampling, every rank played in turn in one process."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specreg.errors import TensorError
from specreg.kernels import ShardPlan, shard_plan
from specreg.ownership import Shard, cdiv, owner_of

NUM_SHARDS = st.integers(1, 5)


@st.composite
def batches(draw):
    """A batch: distinct slots or -1, and 0 to 4 logits rows each."""
    num_reqs = draw(st.integers(0, 9))
    slots = draw(st.permutations(range(12)))[:num_reqs]
    padding = draw(st.lists(st.booleans(), min_size=num_reqs, max_size=num_reqs))
    idx = [-1 if is_padding else slot for slot, is_padding in zip(slots, padding, strict=True)]
    return idx, draw(st.lists(st.integers(0, 4), min_size=num_reqs, max_size=num_reqs))


def plans(idx, counts, num_shards, **kwargs) -> list[ShardPlan]:
    """The plan of each rank."""
    idx_mapping = torch.tensor(idx, dtype=torch.int64)
    cu = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return [
        shard_plan(idx_mapping, cu, Shard(num_shards, rank), **kwargs) for rank in range(num_shards)
    ]


def local_rows(plan: ShardPlan) -> torch.Tensor:
    """Logits rows of the batch that the plan's rank verifies."""
    return plan.order.split([*plan.logits_per_rank.tolist(), unowned(plan)])[plan.shard_idx]


def unowned(plan: ShardPlan) -> int:
    return len(plan.order) - int(plan.logits_per_rank.sum())


@given(batches(), NUM_SHARDS)
def test_every_rank_makes_the_same_plan_without_communication(batch, num_shards):
    first, *others = plans(*batch, num_shards)
    for plan in others:
        for field in ("order", "logits_per_rank", "reqs_per_rank", "restore"):
            assert torch.equal(getattr(plan, field), getattr(first, field))


@given(batches(), NUM_SHARDS)
def test_the_order_is_a_stable_sort_of_the_logits_rows_by_owner(batch, num_shards):
    idx, counts = batch
    owners = [owner_of(slot, num_shards) for slot in idx]
    keys = [
        num_shards if owner < 0 else owner
        for owner, n in zip(owners, counts, strict=True)
        for _ in range(n)
    ]
    plan = plans(idx, counts, num_shards)[0]
    assert plan.order.tolist() == sorted(range(len(keys)), key=keys.__getitem__)
    assert plan.logits_per_rank.tolist() == [keys.count(rank) for rank in range(num_shards)]
    assert plan.reqs_per_rank.tolist() == [owners.count(rank) for rank in range(num_shards)]


@given(batches(), NUM_SHARDS)
def test_local_batches_partition_the_requests_and_keep_their_rows_together(batch, num_shards):
    idx, counts = batch
    starts = [sum(counts[:b]) for b in range(len(counts))]
    seen = []
    for plan in plans(idx, counts, num_shards):
        rows, cu = local_rows(plan), plan.local_cu_num_logits.tolist()
        assert plan.local_reqs.tolist() == sorted(plan.local_reqs.tolist())
        assert cu[0] == 0
        assert cu[-1] == len(rows)
        for place, req in enumerate(plan.local_reqs.tolist()):
            assert plan.local_idx_mapping[place] == idx[req]
            assert owner_of(idx[req], num_shards) == plan.shard_idx
            expected = list(range(starts[req], starts[req] + counts[req]))
            assert rows[cu[place] : cu[place + 1]].tolist() == expected
        seen += plan.local_reqs.tolist()
    assert sorted(seen) == [req for req, slot in enumerate(idx) if slot >= 0]


@given(batches(), NUM_SHARDS)
def test_restore_undoes_the_concatenation_of_the_ranks_outputs(batch, num_shards):
    ranks = plans(*batch, num_shards)
    concatenated = torch.cat([plan.local_reqs for plan in ranks])
    padding = torch.tensor([-1])
    restored = torch.cat([concatenated, padding])[ranks[0].restore]
    expected = [req if slot >= 0 else -1 for req, slot in enumerate(batch[0])]
    assert restored.tolist() == expected


@given(batches(), NUM_SHARDS)
def test_rows_behind_the_last_request_belong_to_nobody(batch, num_shards):
    num_logits = sum(batch[1]) + 3
    for plan in plans(*batch, num_shards, num_logits=num_logits):
        assert sorted(plan.order.tolist()) == list(range(num_logits))
        assert plan.order[-3:].tolist() == list(range(num_logits - 3, num_logits))


@pytest.mark.parametrize(
    ("idx", "num_shards", "reqs_per_rank"),
    [
        ([0, 4, 8], 4, [3, 0, 0, 0]),
        ([5], 2, [0, 1]),
        ([0, 1, 2], 4, [1, 1, 1, 0]),
        ([], 3, [0, 0, 0]),
        ([-1, -1], 2, [0, 0]),
    ],
)
def test_a_rank_that_owns_nothing_has_an_empty_shard(idx, num_shards, reqs_per_rank):
    for plan in plans(idx, [4] * len(idx), num_shards):
        mine = reqs_per_rank[plan.shard_idx]
        assert plan.reqs_per_rank.tolist() == reqs_per_rank
        assert plan.local_idx_mapping.shape == (mine,)
        assert plan.local_cu_num_logits.tolist() == [4 * n for n in range(mine + 1)]


@pytest.mark.parametrize(
    ("vocab_size", "num_shards", "pad_to"), [(10, 4, 4), (32_003, 4, 64), (7, 3, 1)]
)
def test_owners_receive_whole_rows_when_ranks_hold_uneven_vocabulary_slices(
    vocab_size, num_shards, pad_to
):
    idx, counts = [0, 4, 2, -1, 8, 6], [2, 1, 3, 0, 1, 0]  # ranks 1 and 3 of four own nothing
    logits = torch.arange(sum(counts) * vocab_size).view(-1, vocab_size)
    width = cdiv(cdiv(vocab_size, pad_to) * pad_to, num_shards)
    padded = torch.nn.functional.pad(logits, (0, width * num_shards - vocab_size), value=-1)
    slices = padded.split(width, dim=1)
    ranks = plans(idx, counts, num_shards)
    sent = [
        part[plan.order].split(plan.logits_per_rank.tolist())
        for part, plan in zip(slices, ranks, strict=True)
    ]
    for plan in ranks:
        received = torch.cat([parts[plan.shard_idx] for parts in sent], dim=1)[:, :vocab_size]
        assert torch.equal(received, logits[local_rows(plan)])


def test_per_row_parameters_travel_with_the_same_permutation():
    idx, counts = [3, 0, 5, 2], [1, 3, 2, 1]
    expanded = torch.tensor(idx).repeat_interleave(torch.tensor(counts))
    for plan in plans(idx, counts, 2):
        local_counts = plan.local_cu_num_logits.diff()
        local = plan.local_idx_mapping.repeat_interleave(local_counts)
        assert torch.equal(expanded[local_rows(plan)], local)


def test_padded_and_trimmed_plans_agree():
    from specreg.kernels.shard_plan.reference import shard_plan_reference

    idx, cu = torch.tensor([3, -1, 1, 0]), torch.tensor([0, 2, 4, 4, 5])
    padded = shard_plan_reference(idx, cu, Shard(2, 1), 6)
    assert padded.local_reqs.tolist() == [0, 2, -1, -1]
    assert padded.local_idx_mapping.tolist() == [3, 1, -1, -1]
    assert padded.local_cu_num_logits.tolist() == [0, 2, 2, 2, 2]
    trimmed = shard_plan(idx, cu, Shard(2, 1), num_logits=6)
    for field in dataclasses.fields(trimmed):
        short, full = getattr(trimmed, field.name), getattr(padded.trimmed(), field.name)
        assert short == full if isinstance(short, int) else torch.equal(short, full)


@pytest.mark.parametrize(
    ("idx", "cu", "kwargs", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.tensor([0, 1, 2]), {}, "idx_mapping"),
        (torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0, 1, 2]), {}, "idx_mapping"),
        (torch.tensor([0, 1]), torch.tensor([0, 1]), {}, "cu_num_logits"),
        (torch.tensor([0, 1]), torch.tensor([0.0, 1, 2]), {}, "cu_num_logits"),
        (torch.tensor([0, 1]), torch.tensor([0, 2, 1]), {}, "out of order"),
        (torch.tensor([0, 1]), torch.tensor([1, 2, 3]), {}, "out of order"),
        (torch.tensor([0, 1]), torch.tensor([0, 2, 3]), {"num_logits": 2}, "out of order"),
    ],
)
def test_index_maps_that_do_not_fit_are_refused(idx, cu, kwargs, message):
    with pytest.raises(TensorError, match=message):
        shard_plan(idx, cu, Shard(2, 0), **kwargs)


def test_planning_on_a_device_asks_for_the_number_of_rows():
    with pytest.raises(TensorError, match="host synchronisation"):
        shard_plan(
            torch.empty(2, dtype=torch.int64, device="meta"),
            torch.empty(3, dtype=torch.int64, device="meta"),
            Shard(2, 0),
        )
