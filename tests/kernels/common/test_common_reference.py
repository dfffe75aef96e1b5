"""Owner and row arithmetic, exact sums and draws that several ops share."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specreg.kernels.common.reference import (
    LOGIT_MAX,
    clean_logits_reference,
    draw_index_reference,
    owned_row_reference,
    owner_reference,
    point_reference,
    sum_weights_reference,
    to_units_reference,
)
from specreg.ownership import Shard, owner_of

WORDS = st.integers(0, 2**32 - 1)


def test_owner_and_row_of_tensors_are_those_of_integers():
    slots = torch.arange(-3, 40)
    for num_shards in (1, 2, 3, 4, 8):
        owners = [owner_of(slot, num_shards) for slot in slots.tolist()]
        assert owner_reference(slots, num_shards).tolist() == owners
        for rank in range(num_shards):
            shard = Shard(num_shards, rank)
            rows = [shard.row(slot) if shard.owns(slot) else -1 for slot in slots.tolist()]
            assert owned_row_reference(slots, num_shards, rank).clamp(min=-1).tolist() == rows


@given(st.integers(0, 2**62 - 1), WORDS)
def test_a_point_is_the_exact_floor_of_the_total_times_the_uniform(total, word):
    point = point_reference(torch.tensor(total), torch.tensor(word))
    assert int(point) == total * (2 * (word >> 9) + 1) >> 24


@given(st.lists(st.sampled_from([0, 0, 1, 3, 2**40]), min_size=1, max_size=9), WORDS)
def test_a_draw_never_returns_a_lane_of_weight_0(units, word):
    index = int(draw_index_reference(torch.tensor(units), torch.tensor(word)))
    assert units[index] > 0 if any(units) else index == len(units)


def test_the_order_of_a_sum_of_weights_does_not_show():
    weights = torch.rand(512, generator=torch.Generator().manual_seed(0)) ** 8
    shuffled = [weights[torch.randperm(512)] for _ in range(50)]
    float_sums = {float(some.numpy().cumsum(dtype="float32")[-1]) for some in shuffled}
    sums = {int(sum_weights_reference(some)) for some in shuffled}
    assert len(sums) == 1
    assert abs(sums.pop() / 2**21 - float(weights.double().sum())) < 512 * 2.0**-22
    assert len(float_sums) > 1  # which is why sums are of integers


def test_a_sum_of_the_largest_weights_fits():
    assert int(sum_weights_reference(torch.ones(512))) == 2**30


def test_units_are_relative_to_the_peak_and_0_without_one():
    peak = torch.tensor([2.0, 0.0, 1e-40])[:, None]
    weights = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1e-40, 0.0, 1e-40]])
    units = to_units_reference(weights, peak)
    assert units.tolist() == [[2**30, 2**29, 0], [0, 0, 0], [2**30, 0, 2**30]]


def test_clean_logits_have_no_nan_and_nothing_beyond_the_largest():
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1.5])
    cleaned = clean_logits_reference(logits)
    assert cleaned.tolist()[:4] == [-torch.inf, LOGIT_MAX, -torch.inf, LOGIT_MAX]
    assert torch.equal(cleaned[4:], logits[4:])
    assert bool(logits[0].isnan())
