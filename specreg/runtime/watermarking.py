"""The configured draft watermarker, loaded if the speculator of the run works with one."""

from __future__ import annotations

import torch

from specreg.errors import ConfigError, PluginError
from specreg.specs import PolicyInputs
from specreg.watermark import DraftWatermarker, WatermarkerContext

__all__ = ["make_watermarker"]


def make_watermarker(
    inputs: PolicyInputs, vocab_size: int, device: torch.device
) -> DraftWatermarker | None:
    """The draft watermarker of a run; None when none is configured.

    Args:
        inputs: of the run's plan.
        vocab_size: of the target.
        device: where drafts are sampled.

    Raises:
        ConfigError: the speculator does not work with a watermarker, or drafts are argmaxes.
        PluginError: its factory cannot be imported, or gives another thing than it declares.
    """
    declared = inputs.watermarker
    if declared is None:
        return None
    speculative = inputs.config.speculative
    if not inputs.capabilities.supports_watermarker:
        raise ConfigError(
            "the speculator does not work with a draft watermarker",
            where=f"config.draft_watermarker with speculator {inputs.spec.name!r}",
            got=f"{declared.name!r}; allowed: null, or a speculator that declares "
            "Capabilities.supports_watermarker",
            fix="remove draft_watermarker, or choose a speculator that samples step by step "
            "through the DraftSampler",
        )
    if speculative is None or speculative.draft_sample_method != "probabilistic":
        raise ConfigError(
            "drafts that are argmaxes cannot be marked",
            where="config.draft_watermarker",
            got=f"{declared.name!r} with greedy drafts; allowed: null",
            fix="set draft_sample_method to probabilistic, or remove draft_watermarker",
        )
    watermarker: DraftWatermarker = declared.load_factory()(
        WatermarkerContext(inputs.config, vocab_size, device)
    )
    honors = getattr(watermarker, "honors_owner_mask", None)
    is_watermarker = callable(getattr(watermarker, "sample", None)) and isinstance(
        getattr(watermarker, "context_size", None), int
    )
    if not is_watermarker or honors is not declared.honors_owner_mask:
        raise PluginError(
            f"the factory of draft watermarker {declared.name!r} gives another thing than declared",
            where=f"{declared.factory}(context)",
            got=f"{type(watermarker).__name__} with honors_owner_mask={honors}; allowed: a "
            f"DraftWatermarker with honors_owner_mask={declared.honors_owner_mask}",
            fix="make the object's attributes and the factory's declaration agree",
        )
    return watermarker
