"""A plugin that would shard the cache, but for the sampler that it finds when it loads."""

from __future__ import annotations

from dataclasses import replace

import specreg_example

from specreg.capabilities import FusedSampling
from specreg.plugin import DraftSetup, SpeculatorSpec, hookimpl


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    (base,) = specreg_example.specreg_speculators()
    facts = replace(base.capabilities_for(DraftSetup()), fused_sampling=FusedSampling.FULL_CACHE)
    factory = "broken_full_cache_speculator:FullCacheSpeculator"
    return [
        replace(
            base, name="full_cache", methods=("full_cache",), factory=factory, capabilities=facts
        )
    ]
