"""A 64-bit hash of token matrices, by which replicated ranks find out that they agree."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.errors import TensorError
from specreg.kernels.random import random_words_reference

__all__ = ["Fingerprint"]

SEED = 0x5EED


class Fingerprint:
    """Sum of (token + 2) times a random odd word of its place, modulo 2^64.

    It depends on the order, and a change of one token always shows.

    Args:
        max_tokens: the largest matrix that is hashed.
        device: of the tokens.
    """

    def __init__(self, max_tokens: int, device: torch.device | str) -> None:
        words = random_words_reference(torch.tensor(SEED), torch.arange(max_tokens), 0, 0)
        self._weights = (words[0] | (words[1] << 32) | 1).to(device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """int64 scalar on the device, without host synchronisation.

        Args:
            tokens: int64, any shape; -1 where there is none.

        Raises:
            TensorError: more than `max_tokens` tokens.
        """
        if tokens.numel() > len(self._weights):
            raise TensorError(
                "a token matrix cannot be hashed",
                where="Fingerprint(tokens)",
                got=f"{tokens.numel()} tokens; allowed: at most {len(self._weights)}",
                fix="make the fingerprint for as many tokens as the slots can have",
            )
        return ((tokens.flatten() + 2) * self._weights[: tokens.numel()]).sum()
