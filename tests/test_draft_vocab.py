"""Maps of a reduced vocabulary: any list of integers is taken as it is, or refused."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specreg.draft_vocab import check_target_ids, target_to_draft_table
from specreg.errors import TensorError

VOCAB_SIZES = st.integers(1, 40)


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A vocabulary, and distinct ids of it in any order."""
    vocab_size = draw(VOCAB_SIZES)
    ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, unique=True))
    return vocab_size, ids


@given(maps(), st.sampled_from([torch.int64, torch.int32]))
def test_an_injective_map_goes_to_the_target_and_back(found, dtype):
    vocab_size, ids = found
    checked = check_target_ids(
        torch.tensor(ids, dtype=dtype),
        vocab_size=vocab_size,
        draft_vocab_size=len(ids),
        device="cpu",
    )
    if checked is None:
        assert ids == list(range(vocab_size))
        return
    assert checked.dtype == torch.int64
    assert checked.tolist() == ids
    table = target_to_draft_table(checked, vocab_size)
    assert table[checked].tolist() == list(range(len(ids)))
    assert (table >= 0).sum() == len(ids)


@given(maps())
def test_offsets_become_ids_when_the_columns_are_added(found):
    vocab_size, ids = found
    offsets = torch.tensor(ids) - torch.arange(len(ids))
    checked = check_target_ids(
        torch.arange(len(ids)) + offsets,
        vocab_size=vocab_size,
        draft_vocab_size=len(ids),
        device="cpu",
    )
    assert checked is None or checked.tolist() == ids


@given(VOCAB_SIZES, st.lists(st.integers(-3, 44), min_size=1, max_size=20))
def test_whatever_else_is_refused_with_an_offending_id(vocab_size, ids):
    offending = {i for i in ids if ids.count(i) > 1 or not 0 <= i < vocab_size}
    arguments = {"vocab_size": vocab_size, "draft_vocab_size": len(ids), "device": "cpu"}
    if not offending:
        check_target_ids(torch.tensor(ids), **arguments)
        return
    with pytest.raises(TensorError, match="does not map into the target's") as caught:
        check_target_ids(torch.tensor(ids), **arguments)
    shown = re.search(r"such as \[(.*?)\]", caught.value.got)[1]
    assert {int(number) for number in shown.split(",")} <= offending


@given(VOCAB_SIZES, st.integers(1, 40))
def test_fewer_columns_than_the_target_has_need_a_map(vocab_size, num_columns):
    arguments = {"vocab_size": vocab_size, "draft_vocab_size": num_columns, "device": "cpu"}
    if num_columns == vocab_size:
        assert check_target_ids(None, **arguments) is None
        return
    with pytest.raises(TensorError, match="has no map into the target's"):
        check_target_ids(None, **arguments)


@given(maps(), st.integers(1, 40))
def test_a_map_of_another_length_than_declared_is_refused(found, num_columns):
    vocab_size, ids = found
    if num_columns == len(ids):
        return
    with pytest.raises(TensorError, match="has another length"):
        check_target_ids(
            torch.tensor(ids), vocab_size=vocab_size, draft_vocab_size=num_columns, device="cpu"
        )
