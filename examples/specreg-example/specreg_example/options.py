"""Keys of the speculative config that belong to this plugin."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SuffixCountsOptions"]


class SuffixCountsOptions(BaseModel):
    """Options of `suffix_counts`.

    Attributes:
        unseen_mass: weight of all tokens that were never seen in this place, together. One sighting
            behind the same token weighs 1, behind the same two tokens 9.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    unseen_mass: float = Field(0.5, gt=0)
