"""What a draft watermarker needs of a proposal: the newest tokens before each draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specreg.errors import TensorError
from specreg.kernels.common.view import DraftLogitsView
from specreg.watermark import WatermarkInputs

if TYPE_CHECKING:
    from specreg.watermark import DraftWatermarker

__all__ = ["MarkedDrafts", "refuse_marked_candidates"]


class MarkedDrafts:
    """A watermarker and the contexts of the proposal that it draws.

    The contexts lie at a fixed address and are advanced in place, so that steps may be captured in
    a CUDA graph.

    Args:
        watermarker: draws.
        max_num_seqs: rows of a batch, at most.
        device: of the tokens.
    """

    def __init__(
        self, watermarker: DraftWatermarker, max_num_seqs: int, device: torch.device | str
    ) -> None:
        self._watermarker = watermarker
        shape = (max_num_seqs, watermarker.context_size)
        self._context = torch.full(shape, -1, dtype=torch.int64, device=device)

    def begin(self, token_history: Tensor | None, num_reqs: int) -> None:
        """Take the newest tokens of each request from int64 `[num_reqs, max_len]`, -1 padded.

        Raises:
            TensorError: there is no history, or one of another batch.
        """
        if token_history is None or len(token_history) != num_reqs:
            raise TensorError(
                "a watermarker needs the tokens before the drafts",
                where="DraftSampler.begin(token_history)",
                got=f"{None if token_history is None else len(token_history)} rows; allowed: one "
                f"for each of {num_reqs} requests",
                fix="pass the token history of the batch, as in ProposeInputs",
            )
        size = self._context.shape[1]
        padded = torch.nn.functional.pad(token_history, (size, 0), value=-1)
        lengths = (token_history >= 0).sum(1, keepdim=True)
        columns = torch.arange(size, device=token_history.device)
        self._context[:num_reqs].copy_(padded.gather(1, lengths + columns))

    def sample(
        self,
        step: int | Tensor,
        logits: Tensor,
        slots: Tensor,
        steps: Tensor,
        *,
        temperature: Tensor,
        cache: DraftLogitsView | None,
        vocab_size: int,
        target_ids: Tensor | None,
        num_nans: Tensor,
    ) -> Tensor:
        """Draw one step of every request and append it to the contexts.

        Args:
            step: as it was passed to `DraftSampler.sample`.
            logits, slots, steps, temperature, cache, vocab_size, target_ids, num_nans: as in
                `WatermarkInputs`.

        Raises:
            TensorError: several steps at once, whose contexts are not known yet.
        """
        if isinstance(step, Tensor) or len(slots) > len(self._context):
            raise TensorError(
                "a watermarked draft needs the drafts before it",
                where="DraftSampler.sample(step)",
                got="several steps at once; allowed: an integer, one step after another",
                fix="declare Capabilities.supports_watermarker only for speculators that sample "
                "step by step",
            )
        context = self._context[: len(slots)]
        tokens = self._watermarker.sample(
            WatermarkInputs(
                logits=logits,
                slots=slots,
                steps=steps,
                context=context,
                temperature=temperature,
                cache=cache,
                vocab_size=vocab_size,
                target_ids=target_ids,
                num_nans=num_nans,
            )
        )
        context.copy_(torch.cat((context, tokens[:, None]), 1)[:, 1:])
        return tokens


def refuse_marked_candidates() -> None:
    """Raises `TensorError`: watermarkers draw from whole rows."""
    raise TensorError(
        "candidates cannot be drawn by a watermarker",
        where="DraftSampler.sample_candidates",
        got="a draft watermarker; allowed: none",
        fix="leave Capabilities.supports_watermarker False for speculators that score candidates",
    )
