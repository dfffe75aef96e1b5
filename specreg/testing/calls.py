"""The `generate` calls that conformance runs are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specreg.sampling_params import SamplingParams

__all__ = ["CALLS", "DISTRIBUTION_PROMPT", "NUM_SAMPLED_TOKENS", "PROMPTS"]

# Of every length from one token to several chunks; some repeat themselves, for drafters that look.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (5,),
    (3, 4, 5, 6, 3, 4, 5, 6, 3, 4),
    (7, 8),
    tuple(3 + (i * i) % 11 for i in range(23)),
    (9, 9, 9, 9, 9),
    tuple(3 + i % 4 for i in range(17)),
    (12, 4, 12, 4, 12),
)
TEMPERATURES = (0.0, 1e-6, 1.0, 0.7, 1.0, 0.0, 1.3)
MAX_TOKENS = 8
DISTRIBUTION_PROMPT = (3, 4, 5, 6, 3, 4, 5)
NUM_SAMPLED_TOKENS = 4
NUM_SAMPLES = 776  # eight times the slots they run in

Call = tuple[Sequence[Sequence[int]], Sequence[SamplingParams]]


def _params(temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, ignore_eos=True
    )


def _sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_SAMPLED_TOKENS, temperature=1.0, seed=seed, ignore_eos=True
    )


CALLS: Mapping[str, Call] = {
    # More requests than slots: every slot changes hands.
    "greedy": (PROMPTS, [_params(0.0, 100 + i) for i in range(len(PROMPTS))]),
    "mixed": (PROMPTS, [_params(t, 200 + i) for i, t in enumerate(TEMPERATURES)]),
    # One request of "mixed" by itself, in an engine that has run nothing yet and again later.
    "alone": (PROMPTS[3:4], [_params(TEMPERATURES[3], 203)]),
    "alone again": (PROMPTS[3:4], [_params(TEMPERATURES[3], 203)]),
    "pair": (PROMPTS[2:4], [_params(TEMPERATURES[2], 202), _params(TEMPERATURES[3], 203)]),
    "trio": (PROMPTS[1:6:2], [_params(t, 401 + i) for i, t in enumerate((0.0, 1e-6, 1.0))]),
    # Two requests that fit together at first, and not to their ends, into KV for one of them.
    "crowded": (
        [PROMPTS[3], PROMPTS[3][::-1]],
        [
            SamplingParams(max_tokens=14, temperature=0.0, seed=300 + i, ignore_eos=True)
            for i in range(2)
        ],
    ),
    # One prompt, many seeds.
    "many": (
        [DISTRIBUTION_PROMPT] * NUM_SAMPLES,
        [_sampled(1000 + i) for i in range(NUM_SAMPLES)],
    ),
}
