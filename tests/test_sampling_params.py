"""Sampling parameters are settled once, whatever number types they come in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specreg.errors import AdmissionError
from specreg.sampling_params import SMALLEST_TEMPERATURE, SamplingParams


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-38, 1e-45, SMALLEST_TEMPERATURE / 2])
def test_temperatures_too_small_to_divide_by_are_exactly_zero(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).temperature == 0.0


def test_number_types_become_plain_and_a_single_stop_string_is_one() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),
        seed=np.int64(-7),
        top_p=np.float32(0.5),
        stop="end",
        stop_token_ids=[np.int32(4)],
        logit_bias={np.int64(5): np.float32(1)},
    )
    assert (params.max_tokens, params.seed, params.top_p) == (3, -7, 0.5)
    assert (params.stop, params.stop_token_ids) == (("end",), (4,))
    kinds = {type(params.max_tokens), type(params.seed), *map(type, params.logit_bias)}
    assert kinds == {int}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", None),
        ("temperature", -1),
        ("temperature", None),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 10**30),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("seed", "x"),
        ("seed", 2**63),
        ("stop", (1,)),
        ("stop", ("",)),
        ("stop", None),
        ("stop_token_ids", ("1",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", None),
        ("logit_bias", {1: 1000}),
        ("logit_bias", [1]),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("allowed_token_ids", ()),
        ("logprobs", -1),
        ("logprob_token_ids", (1.5,)),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(AdmissionError, match=f"parameter {name} is out of range"):
        SamplingParams(**{name: value})


def test_token_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    with pytest.raises(AdmissionError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(100,)).check_vocabulary(100)
