from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specreg.errors import ConfigError
from specreg.ownership import Shard, cdiv, owner_of, rows_per_rank, shard_row

sizes = st.integers(1, 70)


@given(max_num_seqs=sizes, num_shards=st.integers(1, 9))
def test_every_slot_has_exactly_one_row_of_exactly_one_shard(max_num_seqs, num_shards):
    rows = rows_per_rank(max_num_seqs, num_shards)
    cells = set()
    for slot in range(max_num_seqs):
        owners = [i for i in range(num_shards) if Shard(num_shards, i).owns(slot)]
        assert owners == [owner_of(slot, num_shards)]
        row = Shard(num_shards, owners[0]).row(slot)
        assert 0 <= row < rows
        cells.add((owners[0], row))
    assert len(cells) == max_num_seqs


@given(max_num_seqs=sizes, num_shards=st.integers(1, 9))
def test_owners_differ_by_at_most_one_row_and_no_row_is_spare_everywhere(max_num_seqs, num_shards):
    counts = [
        sum(Shard(num_shards, i).owns(slot) for slot in range(max_num_seqs))
        for i in range(num_shards)
    ]
    assert sum(counts) == max_num_seqs
    assert max(counts) - min(counts) <= 1
    assert max(counts) == rows_per_rank(max_num_seqs, num_shards)


@given(num_shards=st.integers(1, 9), padding=st.integers(-10, -1))
def test_a_padding_row_belongs_to_nobody(num_shards, padding):
    assert owner_of(padding, num_shards) == -1
    assert shard_row(padding, num_shards) == -1
    assert not any(Shard(num_shards, i).owns(padding) for i in range(num_shards))


@given(slot=st.integers(0, 10**6))
def test_one_shard_owns_every_slot_at_its_own_row(slot):
    assert Shard().owns(slot)
    assert Shard().row(slot) == slot


@given(numerator=st.integers(0, 10**6), denominator=st.integers(1, 10**3))
def test_cdiv_is_division_rounded_up(numerator, denominator):
    quotient = cdiv(numerator, denominator)
    assert quotient * denominator >= numerator > (quotient - 1) * denominator


@pytest.mark.parametrize(("num_shards", "shard_idx"), [(0, 0), (2, 2), (2, -1), (-1, 0)])
def test_a_shard_outside_its_group_is_refused(num_shards, shard_idx):
    with pytest.raises(ConfigError, match="a shard cannot be formed"):
        Shard(num_shards, shard_idx)
