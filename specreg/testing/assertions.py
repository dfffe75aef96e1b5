"""Assertions that say by how much, and where, something is off."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["assert_close", "assert_same_distribution", "deviation_sigma"]

SMALLEST_EXPECTED_COUNT = 5.0
NUM_WORST = 5


def deviation_sigma(counts: Tensor, probs: Tensor) -> float:
    """How far counts are from what a distribution gives, in standard deviations of a G-test.

    Outcomes that are expected less than 5 times are pooled. The G statistic's tail is turned into
    sigma by the cube root of Wilson and Hilferty (1931), good to a few per cent out to 6 sigma.

    Args:
        counts: `[num_outcomes]`, how often each was seen.
        probs: `[num_outcomes]`, its probability; they sum to 1.

    Returns:
        Infinity where an outcome of probability 0 was seen; about 0 or below where all is well.
    """
    counts, probs = counts.double(), probs.double()
    if bool((counts[probs <= 0] > 0).any()):
        return math.inf
    expected = probs / probs.sum() * counts.sum()
    order = expected.argsort()
    pooled: list[tuple[float, float]] = []
    seen = wanted = 0.0
    for observed, mean in zip(counts[order].tolist(), expected[order].tolist(), strict=True):
        seen, wanted = seen + observed, wanted + mean
        if wanted >= SMALLEST_EXPECTED_COUNT:
            pooled.append((seen, wanted))
            seen = wanted = 0.0
    if pooled and wanted > 0:
        pooled[-1] = (pooled[-1][0] + seen, pooled[-1][1] + wanted)
    freedom = len(pooled) - 1
    if freedom < 1:
        return 0.0
    statistic = 2 * sum(o * math.log(o / e) for o, e in pooled if o > 0)
    spread = 2 / (9 * freedom)
    return float((max(statistic, 0.0) / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def assert_same_distribution(
    samples: Tensor | Sequence[int], probs: Tensor, sigma: float = 5.0
) -> None:
    """Assert that samples were drawn from a distribution.

    Args:
        samples: integers `[num_samples]`, outcomes in `0 .. num_outcomes - 1`.
        probs: `[num_outcomes]`.
        sigma: the largest deviation that passes; 5 lets one correct run in three million fail.

    Raises:
        AssertionError: with the deviation and the outcomes that are most off.
    """
    drawn = torch.as_tensor(samples).flatten().long()
    counts = torch.bincount(drawn, minlength=len(probs))
    assert len(counts) == len(probs), f"outcome {int(drawn.max())} of {len(probs)} outcomes"
    found = deviation_sigma(counts, probs)
    if found <= sigma:
        return
    expected = probs.double() / probs.double().sum() * len(drawn)
    pull = (counts - expected) / expected.clamp(min=1e-9).sqrt()
    worst = pull.abs().argsort(descending=True)[:NUM_WORST].tolist()
    lines = [
        f"outcome {i}: seen {int(counts[i])}, expected {float(expected[i]):.1f}" for i in worst
    ]
    raise AssertionError(
        f"{len(drawn)} samples deviate by {found:.1f} sigma; allowed: {sigma:g}\n"
        + "\n".join(lines)
    )


def assert_close(
    got: Tensor, expected: Tensor, *, atol: float = 0.0, rtol: float = 0.0, name: str = "tensor"
) -> None:
    """Assert that tensors agree elementwise; NaN agrees with NaN, an infinity with itself.

    Args:
        got, expected: of one shape.
        atol, rtol: allowed is `atol + rtol * abs(expected)`; both 0 asks for equal values.
        name: of what is compared, for the message.

    Raises:
        AssertionError: with the coordinates that are most off.
    """
    assert got.shape == expected.shape, (
        f"{name}: shape {tuple(got.shape)}; allowed: {tuple(expected.shape)}"
    )
    left, right = got.double(), expected.double()
    is_same = (left == right) | (left.isnan() & right.isnan())
    error = torch.where(is_same, 0.0, (left - right).abs()).nan_to_num(nan=math.inf)
    excess = torch.where(is_same, 0.0, error - (atol + rtol * right.abs()))
    excess = excess.nan_to_num(nan=math.inf)
    is_wrong = excess > 0
    if not bool(is_wrong.any()):
        return
    worst = excess.flatten().argsort(descending=True)[: min(NUM_WORST, int(is_wrong.sum()))]
    lines = []
    for flat in worst.tolist():
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
        lines.append(
            f"{name}{list(place)}: got {got[place].item()!r}, expected {expected[place].item()!r}"
        )
    raise AssertionError(
        f"{name}: {int(is_wrong.sum())} of {got.numel()} elements differ by more than "
        f"{atol:g} + {rtol:g} * |expected|; the worst:\n" + "\n".join(lines)
    )
