"""The hook that this plugin adds: fused samplers of a DSpark drafter's proposal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specreg.capabilities import FusedSampling
from specreg.errors import PluginError
from specreg.plugin import hookspec
from specreg.specs import NamedFactory

if TYPE_CHECKING:
    import torch

__all__ = ["DSparkHooks", "MarkovSamplerContext", "MarkovSamplerSpec"]

Predicate = Callable[[Mapping[str, Any], "torch.device"], bool]


@dataclass(frozen=True)
class MarkovSamplerContext:
    """What the factory of a fused sampler gets.

    Attributes:
        draft_config: the draft checkpoint's `config.json`.
        max_num_seqs: slots; no batch has more rows.
        num_speculative_tokens: K.
        vocab_size: columns of the target's vocabulary.
        device: where it runs.
        dtype: of the base logits.
    """

    draft_config: Mapping[str, Any]
    max_num_seqs: int
    num_speculative_tokens: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class MarkovSamplerSpec(NamedFactory):
    """A fused sampler that `fused_sampler` can name.

    Its factory is called once, when a run chooses it, with a `MarkovSamplerContext`. It returns the
    sampler: a callable from `specreg_dspark.markov_inputs.MarkovInputs` to bool, which says there
    what True and False promise.

    Attributes:
        writes: `sharded`: it stores the rows that the cache's shard owns, at their rows in the
            shard, and touches no other byte. `full_cache`: it stores the row of every slot, so it
            is only ever given a cache that has them all.
        predicate: whether it can run a drafter of this config on this device; None is any.
        stores_statistics: it stores temperature, logsumexp and state of each cell beside the
            logits, as `specreg.kernels.draft_sample` does. Otherwise it stores logits alone, and
            the core computes the rest before it verifies: right too, with one read more.
    """

    writes: FusedSampling = FusedSampling.FULL_CACHE
    predicate: Predicate | None = None
    stores_statistics: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            writes = FusedSampling(self.writes)
        except ValueError:
            writes = FusedSampling.NONE
        if writes is FusedSampling.NONE:
            raise PluginError(
                "a fused sampler does not say what it writes",
                where=f"MarkovSamplerSpec {self.name!r}, writes",
                got=f"{self.writes!r}; allowed: 'full_cache' or 'sharded'",
                fix="declare which rows of the draft-logits cache it stores",
            )
        object.__setattr__(self, "writes", writes)


class DSparkHooks(Protocol):
    """The hooks of the DSpark plugin."""

    @hookspec
    def specreg_dspark_markov_samplers(self) -> Iterable[MarkovSamplerSpec]:
        """Offer fused samplers of the K steps of a DSpark proposal.

        When: while a DSpark drafter with a vanilla Markov head is loaded, unless `fused_sampling`
            is off.
        How often: once a load and rank.
        Parameters: none.
        Returns: `MarkovSamplerSpec`s, with what each writes declared.
        Errors: whatever it raises ends the load; the error names the distribution.
        Do not: import torch, triton or the sampler's own modules; decide by anything but the draft
            config and the device, for every rank has to choose alike.
        """
