"""Cut-offs against transformers' logits warpers, and where those leave things open."""

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specreg import cutoffs
from specreg.cutoffs import apply_cutoffs
from specreg.errors import TensorError

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def cut(logits, temperature=1.0, *, vocab_size=None, slots=None, **limits):
    """Every row with the same limits unless `slots` and lists of limits say otherwise."""
    limits = {**OFF, **limits}
    num_slots = 1 if slots is None else max(slots) + 1

    def per_slot(value, dtype):
        values = value if isinstance(value, list) else [value] * num_slots
        return torch.tensor(values, dtype=dtype)

    return apply_cutoffs(
        logits,
        torch.zeros(len(logits), dtype=torch.int64) if slots is None else torch.tensor(slots),
        per_slot(temperature, torch.float32),
        per_slot(limits["top_k"], torch.int64),
        per_slot(limits["top_p"], torch.float32),
        per_slot(limits["min_p"], torch.float32),
        vocab_size=vocab_size or logits.shape[1],
    )


def warped(logits, temperature, top_k, top_p, min_p):
    """What transformers keeps, in its order."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    scores = logits.float()
    for warper in warpers:
        scores = warper(None, scores)
    return scores


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 5003])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 5, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.3, 0, 1.0, 0.1),
        (0.7, 40, 0.8, 0.02),
        (1.0, 3000, 0.999, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 1, 0.5, 1.0),
        (2.0, 2000, 1.0, 1e-3),
    ],
)
def test_kept_columns_and_probabilities_are_those_of_transformers(
    scale, vocab_size, temperature, top_k, top_p, min_p
):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(7)) * scale
    result = cut(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = warped(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(result.isinf(), expected.isinf())
    torch.testing.assert_close((result / temperature).softmax(1), expected.softmax(1))


def test_surviving_values_are_the_logits_before_temperature():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert cut(logits, 0.5, top_k=2).tolist() == [[-torch.inf, 3.0, 2.0, -torch.inf]]
    assert logits.tolist() == [[1.0, 3.0, 2.0, 0.0]]


def test_columns_that_tie_at_the_top_k_cut_are_all_kept():
    assert cut(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), top_k=2).isfinite().tolist() == [
        [True, True, True, False]
    ]


def test_lower_ids_are_kept_among_equals_at_the_top_p_cut():
    assert cut(torch.zeros(1, 4), top_p=0.5).isfinite().tolist() == [[True, True, False, False]]
    mixed = torch.tensor([[0.0, 5.0, 0.0, 0.0]])
    top_p = float(mixed.softmax(1)[0, 1]) + 1e-3
    assert cut(mixed, top_p=top_p).isfinite().tolist() == [[True, True, False, False]]


def test_a_nucleus_wider_than_the_first_look_is_cut_exactly():
    logits = torch.randn(2, 4 * cutoffs.PREFIX, generator=torch.Generator().manual_seed(1)) * 0.1
    result = cut(logits, top_p=0.95)
    assert result[0].isfinite().sum() > cutoffs.PREFIX
    assert torch.equal(result.isinf(), warped(logits, 1.0, 0, 0.95, 0.0).isinf())
    assert cut(torch.zeros(1, 4 * cutoffs.PREFIX), top_p=0.5).isfinite().sum() == 2 * cutoffs.PREFIX


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_the_most_probable_column_is_always_kept(limits):
    logits = torch.tensor([[0.0, 4.0, 1.0]], dtype=torch.bfloat16)
    result = cut(logits, **limits)
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [[-torch.inf, 4.0, -torch.inf]]


def test_rows_without_cutoffs_and_greedy_rows_are_returned_as_they_are():
    logits = torch.randn(4, 9)
    assert cut(logits) is logits
    assert cut(logits, 0.0, top_k=1) is logits
    result = cut(
        logits, [1.0, 0.0, 1.0], slots=[0, 1, 2, 2], top_k=[2, 2, 0], top_p=[1.0, 0.5, 1.0]
    )
    assert result[0].isfinite().sum() == 2
    assert torch.equal(result[1:], logits[1:])


def test_padding_rows_are_inert():
    logits = torch.randn(2, 9)
    slots, one = torch.tensor([-1, 0]), torch.ones(1)
    result = apply_cutoffs(
        logits, slots, one, torch.ones(1, dtype=torch.int64), one, one * 0, vocab_size=9
    )
    assert torch.equal(result[0], logits[0])
    assert result[1].isfinite().sum() == 1


def test_columns_behind_the_vocabulary_neither_count_nor_change():
    logits = torch.tensor([[1.0, 2.0, 9.0, 9.0]])
    assert cut(logits, vocab_size=2, top_k=1).tolist() == [[-torch.inf, 2.0, 9.0, 9.0]]


def test_nan_survives_so_that_whoever_draws_can_count_it():
    result = cut(torch.tensor([[torch.nan, 2.0, 1.0, 0.0]]), top_k=2)
    assert result[0].isnan().tolist() == [True, False, False, False]
    assert result[0, 1:].tolist() == [2.0, 1.0, -torch.inf]


def test_rows_of_nothing_but_minus_infinity_or_nan_stay_as_they_are():
    logits = torch.stack([torch.full((5,), -torch.inf), torch.full((5,), torch.nan)])
    result = cut(logits, top_k=2, top_p=0.5, min_p=0.1)
    torch.testing.assert_close(result, logits, equal_nan=True)


def test_infinite_logits_share_the_mass():
    logits = torch.tensor([[torch.inf, 1.0, torch.inf, 0.0]])
    assert cut(logits, top_p=0.9).isfinite().tolist() == [[False] * 4]
    assert cut(logits, top_p=0.9)[0, 1] == -torch.inf


def test_a_row_is_cut_the_same_alone_and_in_a_batch():
    logits = torch.randn(9, 3001, generator=torch.Generator().manual_seed(3)) * 2
    together = cut(logits, 0.8, top_k=700, top_p=0.9, min_p=1e-3)
    for row in range(9):
        alone = cut(logits[row : row + 1], 0.8, top_k=700, top_p=0.9, min_p=1e-3)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("name", ["expanded_idx_mapping", "temperature", "top_k", "top_p", "min_p"])
def test_parameters_of_a_wrong_dtype_are_refused(name):
    arguments = {
        "expanded_idx_mapping": torch.zeros(2, dtype=torch.int64),
        "temperature": torch.ones(1),
        "top_k": torch.zeros(1, dtype=torch.int64),
        "top_p": torch.ones(1),
        "min_p": torch.zeros(1),
    }
    arguments[name] = arguments[name].to(torch.int16)
    with pytest.raises(TensorError, match=rf"apply_cutoffs\({name}\)"):
        apply_cutoffs(torch.zeros(2, 4), **arguments, vocab_size=4)


def test_logits_narrower_than_the_vocabulary_are_refused():
    with pytest.raises(TensorError, match="vocab_size=5"):
        cut(torch.zeros(2, 4), vocab_size=5)
