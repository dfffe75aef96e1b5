"""A guarded cache names the first byte that was written where nothing may be."""

from __future__ import annotations

import pytest
import torch

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.ownership import Shard
from specreg.testing import GuardedCache

STEPS, WIDTH = 2, 5


@pytest.fixture
def guarded() -> GuardedCache:
    cache = DraftLogitsCache(
        torch.empty(3, STEPS, WIDTH, dtype=torch.bfloat16),
        Shard(2, 1),
        DraftLogitsLayout.DENSE,
        WIDTH,
    )
    guarded = GuardedCache(cache, "rank 1 of 2")
    guarded.begin()
    return guarded


def test_a_fresh_cache_is_poisoned(guarded):
    assert guarded.cache.logits.isnan().all()
    assert guarded.cache.view().logits.data_ptr() == guarded.cache.logits.data_ptr()
    assert guarded.violations([]) == []


def test_a_store_for_an_owned_slot_is_allowed_and_for_another_is_named(guarded):
    guarded.cache.logits[1, 0, 2] = 1.0  # slot 3
    assert guarded.violations([3]) == []
    (line,) = guarded.violations([5])
    assert "rank 1 of 2 wrote 2 bytes of draft_logits.logits" in line
    assert "byte 4 of row 1 (slot 3), step 0; allowed: rows [2]" in line


@pytest.mark.parametrize("slot", [-1, 2])
def test_padding_and_slots_of_other_ranks_allow_nothing(guarded, slot):
    guarded.cache.logits[1] = 1.0
    assert len(guarded.violations([slot])) == 1


@pytest.mark.parametrize(("row", "name"), [(-1, "the row 1 before"), (3, "the row 1 behind")])
def test_writes_around_the_cache_are_seen(guarded, row, name):
    cells = guarded.cache.logits
    offset = cells.storage_offset() + row * cells.stride(0)
    cells.as_strided((WIDTH,), (1,), offset)[0] = 0.0
    (line,) = guarded.violations(range(6))
    assert name in line


@pytest.mark.parametrize("name", ["temperature", "logsumexp", "state"])
def test_statistics_are_guarded_too(guarded, name):
    getattr(guarded.cache, name)[2, 1] = 1
    (line,) = guarded.violations([1])
    assert f"draft_logits.{name}" in line
    assert "row 2 (slot 5), step 1" in line
