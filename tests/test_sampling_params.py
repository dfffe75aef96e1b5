"""What a request may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from specreg.errors import AdmissionError
from specreg.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("max_tokens", 0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("stop", ("a", "")),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: float("nan")}),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (3, -1)),
        ("logprobs", -1),
        ("logprob_token_ids", (-1,)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(AdmissionError, match=f"sampling parameter {name} is out of range") as error:
        SamplingParams(**{name: value})
    assert error.value.where == f"SamplingParams.{name}"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("logit_bias", {100: 1.0}, "0..99"),
        ("allowed_token_ids", (3, 100), "0..99"),
        ("logprob_token_ids", (100,), "0..99"),
        ("logprobs", 101, "at most 100"),
    ],
)
def test_ids_that_the_vocabulary_does_not_have_are_refused(
    name: str, value: Any, allowed: str
) -> None:
    params = SamplingParams(**{name: value})
    params.check_vocabulary(102)
    with pytest.raises(AdmissionError, match=f"sampling parameter {name} is out of range") as error:
        params.check_vocabulary(100)
    assert allowed in error.value.got


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).temperature == 0.0


@pytest.mark.parametrize(
    ("params", "has_penalties"),
    [
        ({}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
    ],
)
def test_penalties_are_on_when_one_differs_from_its_neutral_value(
    params: dict[str, float], has_penalties: bool
) -> None:
    assert SamplingParams(**params).has_penalties is has_penalties


def test_parameters_with_a_bias_can_be_kept_in_a_set() -> None:
    assert len({SamplingParams(logit_bias={1: 2.0}), SamplingParams(logit_bias={1: 2.0})}) == 1
