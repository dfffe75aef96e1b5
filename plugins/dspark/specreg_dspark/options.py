"""Options of DSpark drafters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DSparkOptions"]


class DSparkOptions(BaseModel):
    """How drafts are drawn.

    Attributes:
        dspark_draft_topk: columns of a step that may be drafted, those that the backbone scores
            highest; None is all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dspark_draft_topk: int | None = Field(None, ge=1)
