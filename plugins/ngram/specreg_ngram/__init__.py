"""Plugin: what followed the same tokens before is proposed again (`method: ngram`)."""

from __future__ import annotations

from specreg.capabilities import Capabilities, DraftingStyle, TargetNeeds
from specreg.plugin import SpeculatorSpec, hookimpl
from specreg_ngram.options import NgramOptions

__all__ = ["specreg_speculators"]

CAPABILITIES = Capabilities(
    style=DraftingStyle.RETRIEVAL,
    # Without a distribution there is nothing to write: no layout, and no write past the mask.
    layouts=frozenset(),
    honors_owner_mask=True,
)


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="ngram",
            methods=("ngram",),
            factory="specreg_ngram.speculator:NgramSpeculator",
            capabilities=CAPABILITIES,
            target_needs=TargetNeeds(needs_token_history=True),
            options_model=NgramOptions,
            needs_checkpoint=False,
            summary="prompt look-up: what followed the newest tokens when they stood there before",
        )
    ]
