"""Which EAGLE a `config.json` describes, by the names in it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "EAGLE1_FAMILIES",
    "EAGLE3_FAMILIES",
    "MASK_TOKEN_KEYS",
    "architectures_of",
    "is_eagle1",
    "is_eagle3",
    "is_parallel",
]

DraftConfig = Mapping[str, Any]

# Architecture -> family of the head. With the method given, the base model's own name will do.
EAGLE1_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "EagleLlamaForCausalLM": "llama",
        "EagleMistralForCausalLM": "mistral",
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
    }
)
EAGLE3_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "Eagle3LlamaForCausalLM": "llama",
        "Eagle3MiniMaxM2ForCausalLM": "llama",
        "Eagle3Qwen2_5vlForCausalLM": "llama",
        "Eagle3Qwen3ForCausalLM": "qwen3",
        "Eagle3Qwen3vlForCausalLM": "llama",
        "LlamaForCausalLM": "llama",
        "LlamaForCausalLMEagle3": "llama",
        "PeagleLlamaForCausalLM": "llama",
        "PeagleQwen3ForCausalLM": "qwen3",
        "Qwen3ForCausalLM": "qwen3",
    }
)
PARALLEL = ("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")
# In the order in which they are looked at; the first one is nested.
MASK_TOKEN_KEYS = (
    "dflash_config.mask_token_id",
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)


def architectures_of(config: DraftConfig) -> tuple[str, ...]:
    """Names in `architectures`, which may be one string; empty without the key."""
    names = config.get("architectures")
    names = names if isinstance(names, list | tuple) else [names]
    return tuple(name for name in names if isinstance(name, str))


def is_eagle3(config: DraftConfig) -> bool:
    """Whether a config is that of an EAGLE-3 head, whatever it drafts in one pass."""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in ("eagle3", "peagle")
    if config.get("model_type") == "eagle":
        return config.get("method") == "eagle3"
    return any(
        name.startswith("Eagle3") or name.endswith("Eagle3") or name in PARALLEL
        for name in architectures_of(config)
    )


def is_eagle1(config: DraftConfig) -> bool:
    """Whether a config is that of an EAGLE-1 head, whether or not its family is known here."""
    if "speculators_model_type" in config or is_eagle3(config):
        return False
    if config.get("model_type") == "eagle":
        return config.get("method") in (None, "eagle")
    return any(name.startswith("Eagle") for name in architectures_of(config))


def is_parallel(config: DraftConfig) -> bool:
    """Whether a config is that of an EAGLE-3 head that drafts every token in one pass.

    It says so by its name, or by a mask token. A `speculators` config always says it by its name.
    """
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "peagle")
    if not is_eagle3(config):
        return False
    return bool(set(architectures_of(config)) & set(PARALLEL)) or any(
        config.get(key) is not None for key in MASK_TOKEN_KEYS[1:]
    )
