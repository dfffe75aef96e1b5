"""Finding the newest tokens of each request further up, and what followed them there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["look_up"]


def look_up(history: Tensor, min_length: int, max_length: int, num_drafts: int) -> Tensor:
    """Tokens that followed the longest earlier occurrence of each row's newest tokens.

    Of the places where at least `min_length` of the newest tokens stand, those that agree in most
    tokens, `max_length` at most, are preferred; among them the first. An occurrence may overlap the
    newest tokens, and what followed it may, too. Reads `history` `max_length` times and does not
    synchronise with the host.

    Args:
        history: int64 `[num_reqs, max_len]`, all tokens of each request; -1 behind them.
        min_length, max_length: tokens of a match, 1 <= `min_length` <= `max_length`.
        num_drafts: tokens wanted.

    Returns:
        int64 `[num_reqs, num_drafts]`; -1 where nothing matches, and behind what followed.
    """
    places = torch.arange(history.shape[1], device=history.device)
    num_tokens = (history >= 0).sum(1, keepdim=True)
    # How many tokens ending at each place equal as many at the end.
    lengths = torch.zeros_like(history)
    agrees = places < num_tokens - 1  # something must follow
    for back in range(max_length):
        newest = history.gather(1, (num_tokens - 1 - back).clamp(min=0))
        shifted = F.pad(history, (back, 0), value=-1)[:, : history.shape[1]]
        agrees = agrees & (shifted == newest) & (newest >= 0)
        lengths += agrees
    longest = lengths.amax(1, keepdim=True)
    first = lengths.eq(longest).int().argmax(1, keepdim=True)  # the first of equals
    wanted = first + 1 + torch.arange(num_drafts, device=history.device)
    drafts = F.pad(history, (0, num_drafts), value=-1).gather(1, wanted)
    return drafts.masked_fill(longest < min_length, -1)
