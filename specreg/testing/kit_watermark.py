"""A draft watermarker of the kit's own, so that every speculator can be tried with one."""

from __future__ import annotations

from specreg.plugin import DraftWatermarkerFactory, hookimpl
from specreg.registry import Registry
from specreg.watermark import DraftWatermarker, KeyedGumbel, WatermarkerContext

__all__ = ["WATERMARKER", "make_watermarker", "with_watermarker"]

WATERMARKER = "conformance-kit"


def make_watermarker(context: WatermarkerContext) -> DraftWatermarker:
    """Draws by a key that everybody knows."""
    del context
    return KeyedGumbel(1)


class _Plugin:
    __name__ = "specreg-testing"

    @hookimpl
    def specreg_draft_watermarkers(self) -> list[DraftWatermarkerFactory]:
        factory = f"{__name__}:make_watermarker"
        return [DraftWatermarkerFactory(WATERMARKER, factory, honors_owner_mask=True)]


def with_watermarker(registry: Registry) -> Registry:
    """The same plugins, and one with the watermarker `WATERMARKER`."""
    own = Registry.from_plugins([_Plugin()])
    return Registry((*registry.plugins, *own.plugins), registry.broken, registry.left_out)
