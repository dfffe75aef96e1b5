"""Philox4x32-10 against the published known answers, and the independence of its streams."""

import itertools

import pytest
import torch

from specreg.kernels import random as kernels_random
from specreg.kernels.random import philox4x32_reference, random_words_reference, uniform_reference

STREAMS = {name: getattr(kernels_random, name) for name in dir(kernels_random) if "STREAM_" in name}

# kat_vectors of the Random123 distribution, "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, answer):
    assert tuple(philox4x32_reference(torch.tensor(key), torch.tensor(counter)).tolist()) == answer


def test_key_is_the_whole_seed_and_the_counter_names_position_step_stream_and_token():
    seed = -(2**40) + 12345
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    expected = philox4x32_reference(
        torch.tensor([low, high]), torch.tensor([77, 5 | 3 << 16, 9, 0])
    )
    words = random_words_reference(torch.tensor(seed), torch.tensor(77), 5, 3, 9)
    assert torch.equal(words, expected)


def test_every_bit_of_the_seed_changes_the_words():
    seeds = torch.cat([torch.tensor([0]), torch.tensor(1) << torch.arange(64)])
    words = random_words_reference(seeds, torch.tensor(0), 0, 0)[0]
    assert len(set(words.tolist())) == 65


def test_uniforms_are_strictly_inside_the_unit_interval():
    uniforms = uniform_reference(torch.tensor([0, 511, 512, 2**32 - 1]))
    assert uniforms.tolist() == [2.0**-24, 2.0**-24, 3 * 2.0**-24, 1 - 2.0**-24]


def test_streams_are_distinct_and_their_counters_never_meet():
    assert len(STREAMS) == 5
    counters = [{step | stream << 16 for step in (0, 1, 2**16 - 1)} for stream in STREAMS.values()]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(counters, 2))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(sorted(STREAMS), 2)))
def test_streams_are_pairwise_independent(first, second):
    """Chi-square of the joint 16 x 16 histogram, 225 df: 5 sigma: 331; a shared one scores 3e6."""
    num_draws = 200_000
    positions = torch.arange(num_draws)
    buckets = [
        random_words_reference(torch.tensor(42), positions, 1, STREAMS[name])[0] >> 28
        for name in (first, second)
    ]

    def chi_square(a, b):
        joint = torch.bincount(a * 16 + b, minlength=256).double().view(16, 16)
        expected = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True) / num_draws
        return float(((joint - expected) ** 2 / expected).sum())

    assert chi_square(*buckets) < 331
    assert chi_square(buckets[0], buckets[0]) > 2e6


@pytest.mark.parametrize("axis", ["seed", "position", "step", "token", "word"])
def test_neighbouring_draws_are_uncorrelated(axis):
    num_draws = 200_000
    at = {"seed": torch.arange(num_draws), "position": torch.tensor(3), "step": 1, "token": 2}
    shifted = dict(at)
    if axis != "word":
        shifted[axis] = at[axis] + 1
    draws = random_words_reference(at["seed"], at["position"], at["step"], 0, at["token"])
    others = random_words_reference(
        shifted["seed"], shifted["position"], shifted["step"], 0, shifted["token"]
    )
    first = uniform_reference(draws[0])
    second = uniform_reference(draws[1] if axis == "word" else others[0])
    correlation = torch.corrcoef(torch.stack([first, second]).double())[0, 1]
    assert abs(float(correlation)) < 5 / num_draws**0.5
