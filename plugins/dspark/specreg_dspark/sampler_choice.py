"""Which fused sampler draws a run's proposals, and what its writes cost the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from specreg.capabilities import DraftLogitsLayout, FusedSampling
from specreg.draft_sampler import DraftSampler
from specreg.errors import ConfigError, PluginError, SpecregError
from specreg.registry import get_registry
from specreg.speculator import SpeculatorContext
from specreg.spelling import known_names
from specreg_dspark.hooks import MarkovSamplerContext, MarkovSamplerSpec
from specreg_dspark.markov_inputs import MarkovInputs
from specreg_dspark.probe import Probe, Sampler

__all__ = ["STOCK", "SamplerChoice"]

logger = logging.getLogger(__name__)

HOOK = "specreg_dspark_markov_samplers"
WHERE = "speculative_config.fused_sampling"
STOCK = MarkovSamplerSpec(
    name="markov_sample",
    factory="specreg_dspark.stock_sampler:make_stock_sampler",
    writes=FusedSampling.SHARDED,
    stores_statistics=True,
)
"""specreg's own: any vanilla head, layout dense or draft_vocab, greedy or not."""


@dataclass(frozen=True)
class _Offer:
    spec: MarkovSamplerSpec
    distribution: str

    def __str__(self) -> str:
        return f"fused sampler {self.spec.name} of {self.distribution}"


class SamplerChoice:
    """The fused sampler of a run, or the loop.

    Chosen is the one that `fused_sampler` names; else the one of a plugin whose predicate holds,
    which is more special than the stock one; else the stock one. Two plugins' are an error that
    names both. On a CPU the stock one has to be asked for, by name or by `require`: it is no faster
    there than the loop.

    Where there will be a draft-logits cache, the one that is chosen is probed as `Probe` says, in
    each layout that the run may get; in a layout where it declines it is not asked again, because
    nobody has seen what it would write. One that declares `sharded` and is seen to write otherwise
    loses the run its opt-in, and `opt_out_reason` names it and the byte, whatever draws in the end.
    It is then what it did not say, a writer of the full-size cache, and runs on that if a second
    probe there is clean: the cache is full-size already, and whatever it writes is then at its
    place. If that probe is not clean either, or it declines, the loop runs. One that declares
    `full_cache` costs the opt-in only when it runs.

    Args:
        context: of the speculator.
        probe: the drafter's head and sizes, to probe with.
        obstacle: why no fused sampler can draw for this drafter; empty when one can.

    Attributes:
        opt_out_reason: why the cache may not be sharded; empty when it may.

    Raises:
        ConfigError: `require` and none can be used, or `fused_sampler` names none that can or
            stands beside `off`.
        PluginError: two apply, one is not declared correctly, or one that is required does not
            write what it declares or declines.
    """

    def __init__(self, context: SpeculatorContext, probe: Probe, obstacle: str = "") -> None:
        options = context.options
        mode: str = "auto" if options is None else options.fused_sampling
        wanted: str | None = None if options is None else options.fused_sampler
        self.opt_out_reason = ""
        self._context, self._probe = context, probe
        self._sampler: Sampler | None = None
        self._offer: _Offer | None = None
        self._layouts: frozenset[DraftLogitsLayout] = frozenset()
        self._door: DraftSampler | None = None
        self._is_required = mode == "require"
        self._answers: dict[int, bool] = {}
        self._fault = ""
        if mode == "off":
            return
        if not obstacle and context.config.draft_watermarker is not None:
            obstacle = "a draft watermarker draws"
        if obstacle:
            fix = "remove the key, or what stands against it"
            if wanted is not None:
                _refuse(f"{wanted!r}, and {obstacle}", fix, "fused_sampler")
            if self._is_required:
                _refuse(f"'require', and {obstacle}", fix)
            return
        self._offer = self._chosen(wanted)
        if self._offer is None:
            return
        self._load(self._offer)
        if self._is_required and (self._fault or self._sampler is None):
            does = "does not write what it declares" if self._fault else "declines"
            raise PluginError(
                f"a fused sampler that is required {does}",
                where=f"{WHERE}, {self._offer}",
                got=self._fault or "it declined every layout that the run may get",
                fix="repair the plugin, name another one in fused_sampler, or set fused_sampling "
                "to 'auto'",
            )

    @property
    def name(self) -> str | None:
        """Name of the sampler in use; None for the loop."""
        return None if self._sampler is None or self._offer is None else self._offer.spec.name

    @property
    def is_active(self) -> bool:
        """Whether `run` may draw anything; otherwise it need not be called."""
        return self._sampler is not None

    def bind(self, door: DraftSampler) -> None:
        """Keep the sampler that lends, to tell it of logits that were stored bare.

        Args:
            door: of the run; the one that lent what `run` gets. Before the first `run`.

        Raises:
            PluginError: a sampler that is required has declined the layout of the run's cache.
        """
        self._door = door
        cache = door.cache
        if self._is_required and cache is not None and cache.layout not in self._layouts:
            drawn = ", ".join(sorted(layout.value for layout in self._layouts))
            raise PluginError(
                "a fused sampler that is required declines",
                where=f"{WHERE}, {self._offer}",
                got=f"a cache of layout {cache.layout.value}; allowed: {drawn}",
                fix="name such a layout in draft_logits_layout, or set fused_sampling to 'auto'",
            )

    def run(self, inputs: MarkovInputs) -> bool:
        """Draw a proposal; False when nothing was done, and the loop has to.

        Raises:
            PluginError: the sampler raised, or it answers otherwise than for an equal batch before:
                a CUDA graph would hold one answer or the other.
        """
        if self._sampler is None or self._offer is None:
            return False
        cache = inputs.cache
        if cache is not None and cache.layout not in self._layouts:
            return False
        with _naming(self._offer, "a fused sampler"):
            did = self._sampler(inputs)
        num_reqs = len(inputs.idx_mapping)
        if did is not self._answers.setdefault(num_reqs, did) or not isinstance(did, bool):
            raise PluginError(
                "a fused sampler does not keep to its answer",
                where=f"{self._offer}",
                got=f"{did!r} for {num_reqs} rows; allowed: True or False, and for batches of one "
                "size the same",
                fix="decide by shapes, dtypes and layout alone",
            )
        if did and cache is not None and not self._offer.spec.stores_statistics:
            assert self._door is not None
            self._door.mark_bare()
        return did

    def _chosen(self, wanted: str | None) -> _Offer | None:
        offers = [*self._offers_of_plugins(), _Offer(STOCK, "specreg")]
        if wanted is not None:
            named = [offer for offer in offers if offer.spec.name == wanted]
            if not named:
                known = known_names(wanted, {offer.spec.name for offer in offers})
                _refuse(
                    f"{wanted!r}; {known}",
                    "correct the name, or install its plugin",
                    "fused_sampler",
                )
            if len(named) == 1 and not self._applies(named[0]):
                _refuse(
                    f"{named[0]}, whose predicate refuses the drafter or {self._context.device}",
                    "remove the key, or use what the sampler is for",
                    "fused_sampler",
                )
            return _only(named)
        applying = [offer for offer in offers[:-1] if self._applies(offer)]
        if applying:
            return _only(applying)
        is_faster = self._context.device.type != "cpu"
        return offers[-1] if is_faster or self._is_required else None

    def _offers_of_plugins(self) -> list[_Offer]:
        registry = self._context.registry or get_registry()
        offers = []
        for distribution, found in registry.call_hook(HOOK):
            try:
                specs = list(found)
            except Exception as error:
                raise PluginError(
                    f"the hook {HOOK} returned something else than it promises",
                    where=f"distribution {distribution}",
                    got=f"{type(error).__name__}: {error}; allowed: an iterable of "
                    "MarkovSamplerSpec",
                    fix="correct what the hook returns",
                ) from error
            for spec in specs:
                if not isinstance(spec, MarkovSamplerSpec):
                    raise PluginError(
                        f"the hook {HOOK} returned something else than it promises",
                        where=f"distribution {distribution}",
                        got=f"{spec!r}; allowed: an iterable of MarkovSamplerSpec",
                        fix="correct what the hook returns",
                    )
                offers.append(_Offer(spec, distribution))
        return offers

    def _applies(self, offer: _Offer) -> bool:
        predicate = offer.spec.predicate
        if predicate is None:
            return True
        with _naming(offer, "the predicate of a fused sampler"):
            return bool(predicate(self._context.draft_config, self._context.device))

    def _load(self, offer: _Offer) -> None:
        context, speculative = self._context, self._context.config.speculative
        assert speculative is not None
        draft_config: Mapping[str, Any] = context.draft_config
        make = offer.spec.load_factory()
        with _naming(offer, "the factory of a fused sampler"):
            made = make(
                MarkovSamplerContext(
                    draft_config=draft_config,
                    max_num_seqs=context.config.max_num_seqs,
                    num_speculative_tokens=self._probe.num_steps,
                    vocab_size=self._probe.vocab_size,
                    device=context.device,
                    dtype=self._probe.dtype,
                )
            )
        if not callable(made):
            raise PluginError(
                "the factory of a fused sampler gives none",
                where=f"{offer}, {offer.spec.factory}",
                got=f"{type(made).__name__}; allowed: a callable from MarkovInputs to bool",
                fix="return the sampler",
            )
        self._sampler = made
        is_sharded = offer.spec.writes is FusedSampling.SHARDED
        if speculative.draft_sample_method == "probabilistic":
            self._try(made, offer, is_sharded)
            if not self._layouts:
                self._sampler = None
        if not is_sharded and self._sampler is not None:
            self.opt_out_reason = f"{offer} writes the full-size cache"

    def _try(self, sampler: Sampler, offer: _Offer, is_sharded: bool) -> None:
        """Probe it as what it declares; a false `sharded` is told, and probed as `full_cache`."""
        fault = self._probed(sampler, offer, is_sharded)
        if not fault:
            return
        self._fault = f"{offer} declares {offer.spec.writes.value}, but {fault}"
        if not is_sharded:
            logger.warning("%s: the loop draws instead", self._fault)
            return
        logger.warning("%s: the draft-logits cache is not sharded", self._fault)
        fault = self._probed(sampler, offer, is_sharded=False)
        self.opt_out_reason = self._fault
        if fault:
            self.opt_out_reason += f"; and {fault} in a full-size one"
        elif not self._layouts:
            self.opt_out_reason += "; and it declines a full-size one"
        if not self._layouts:
            logger.warning("%s: the loop draws instead", self.opt_out_reason)

    def _probed(self, sampler: Sampler, offer: _Offer, is_sharded: bool) -> str:
        """Probe all layouts and keep those that it draws in; returns the first fault."""
        drawn = set()
        for layout in self._probe.layouts:
            result = self._probe(
                sampler,
                layout,
                is_sharded=is_sharded,
                stores_statistics=offer.spec.stores_statistics,
            )
            if result.fault:
                return result.fault
            if result.has_sampled:
                drawn.add(layout)
        self._layouts = frozenset(drawn)
        return ""


@contextmanager
def _naming(offer: _Offer, what: str) -> Iterator[None]:
    """Tell what a plugin's code raises by mistake with the sampler's name."""
    try:
        yield
    except (SpecregError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PluginError(
            f"{what} failed",
            where=f"{offer}",
            got=f"{type(error).__name__}: {error}",
            fix="repair the plugin, or set fused_sampling to 'off'",
        ) from error


def _only(offers: list[_Offer]) -> _Offer:
    if len(offers) > 1:
        raise PluginError(
            "several fused samplers can draw for this drafter",
            where="speculative_config.fused_sampler",
            got=f"{' and '.join(map(str, offers))}; allowed: one",
            fix="name one in fused_sampler, or leave a plugin out with SPECREG_DISABLE_PLUGINS",
        )
    return offers[0]


def _refuse(got: str, fix: str, key: str = "fused_sampling") -> NoReturn:
    raise ConfigError(
        "there is no fused sampler for this run",
        where=f"speculative_config.{key}",
        got=f"{got}; allowed: a sampler that can draw for the drafter",
        fix=fix,
    )
