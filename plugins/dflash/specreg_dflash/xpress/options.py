"""Options of XPress drafters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["XPressOptions"]


class XPressOptions(BaseModel):
    """How the refiner is run.

    Attributes:
        xpress_topc: columns of a draft that refinement may choose, those that the backbone scores
            highest; 0 is all of them. None takes what the checkpoint says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    xpress_topc: int | None = Field(None, ge=0)
