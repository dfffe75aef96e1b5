"""Plugin: draft watermarkers with a secret key (`draft_watermarker: keyed-gumbel`)."""

from __future__ import annotations

from specreg.plugin import DraftWatermarkerFactory, hookimpl

__all__ = ["specreg_draft_watermarkers"]


@hookimpl
def specreg_draft_watermarkers() -> list[DraftWatermarkerFactory]:
    return [
        DraftWatermarkerFactory(
            name="keyed-gumbel",
            factory="specreg.watermark:keyed_gumbel",
            honors_owner_mask=True,
        ),
        DraftWatermarkerFactory(
            name="keyed-gumbel-unmasked",
            factory="specreg.watermark:unmasked_keyed_gumbel",
        ),
    ]
