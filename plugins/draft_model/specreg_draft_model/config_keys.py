"""Keys of a `config.json` that nothing reads: often a setting that another library would honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["unknown_keys"]

# Written by libraries into any config; none of them changes the arithmetic.
BOOKKEEPING = frozenset({"_name_or_path", "auto_map", "dtype", "torch_dtype", "use_cache"})


def unknown_keys(draft_config: Mapping[str, Any]) -> list[str]:
    """Keys that are no field of the config's own `model_type`, sorted; none for an unknown type."""
    from transformers import AutoConfig

    model_type = str(draft_config.get("model_type"))
    try:
        known = AutoConfig.for_model(model_type).to_dict()
    except (KeyError, ValueError):
        return []
    # rope_parameters holds what older files keep at the top.
    legacy = {"rope_theta", "rope_scaling"} if "rope_parameters" in known else set()
    return sorted(draft_config.keys() - known.keys() - BOOKKEEPING - legacy)
