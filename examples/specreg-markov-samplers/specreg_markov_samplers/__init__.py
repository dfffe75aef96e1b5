"""Plugin: three fused samplers for DSpark drafters, to compare what becomes of each."""

from __future__ import annotations

from specreg_dspark.hooks import MarkovSamplerSpec

from specreg.capabilities import FusedSampling
from specreg.plugin import hookimpl

__all__ = ["specreg_dspark_markov_samplers"]

MODULE = "specreg_markov_samplers.samplers"


@hookimpl(optionalhook=True)
def specreg_dspark_markov_samplers() -> list[MarkovSamplerSpec]:
    return [
        MarkovSamplerSpec(
            name="owner_aware",
            factory=f"{MODULE}:make_owner_aware",
            writes=FusedSampling.SHARDED,
            stores_statistics=True,
        ),
        MarkovSamplerSpec(
            name="full_cache",
            factory=f"{MODULE}:make_full_cache",
            writes=FusedSampling.FULL_CACHE,
        ),
        MarkovSamplerSpec(
            name="lying",
            factory=f"{MODULE}:make_full_cache",
            writes=FusedSampling.SHARDED,
        ),
    ]
