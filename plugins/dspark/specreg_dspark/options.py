"""Options of DSpark drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["DSparkOptions"]


class DSparkOptions(BaseModel):
    """How drafts are drawn.

    Attributes:
        dspark_draft_topk: columns of a step that may be drafted, those that the backbone scores
            highest; None is all of them.
        fused_sampling: `auto` draws with a fused sampler where one applies, `off` with the loop,
            `require` makes it an error when none can be used, or when the one that was chosen does
            not write what it declares.
        fused_sampler: name of the fused sampler; None chooses. An error where none can draw: with
            `off`, `dspark_draft_topk`, another head than a vanilla one or a draft watermarker.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dspark_draft_topk: int | None = Field(None, ge=1)
    fused_sampling: Literal["auto", "off", "require"] = "auto"
    fused_sampler: str | None = None

    @model_validator(mode="after")
    def _check_sampler(self) -> DSparkOptions:
        if self.fused_sampler is not None and self.fused_sampling == "off":
            raise ValueError(
                f"fused_sampler is {self.fused_sampler!r}, and fused_sampling is 'off'; remove one "
                "of the two keys"
            )
        return self
