"""Which draft configs are of DSpark, and which of these are of a kind that is implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specreg_dflash.config_form import ConfigForm

from specreg.errors import CheckpointError

__all__ = ["is_dspark", "refuse_other_layers"]

ARCHITECTURE = "Qwen3DSparkModel"
# Of experts and of latent attention, in the configs of the families that have them.
OTHER_LAYERS = (
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "q_lora_rank",
)


def is_dspark(draft_config: Mapping[str, Any]) -> bool:
    """Whether a config is of a DSpark drafter of any kind, or of a target that contains one."""
    named = _architectures(draft_config)
    named += [draft_config.get(key) for key in ("model_type", "speculators_model_type")]
    is_named = any("dspark" in name.lower() for name in named if isinstance(name, str))
    return is_named or any(key.startswith("dspark_") for key in draft_config)


def refuse_other_layers(form: ConfigForm) -> None:
    """Refuse drafters whose layers are not plain ones. Raises `CheckpointError`."""
    named = _architectures(form.top.config)
    found = [key for key in OTHER_LAYERS if form.decoder.config.get(key)]
    if (form.is_speculators or ARCHITECTURE in named) and not found:
        return
    also = f" with {', '.join(found)}" if found else ""
    raise CheckpointError(
        "a DSpark drafter has layers that are not implemented",
        where=f"{form.top.where}, architectures",
        got=f"{', '.join(map(str, named)) or 'none'}{also}; allowed: {ARCHITECTURE}, or the form "
        "of speculators, with dense layers: neither experts nor latent attention",
        fix="use a dense DSpark drafter of this target",
    )


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    named = config.get("architectures")
    return list(named) if isinstance(named, list | tuple) else [named]
