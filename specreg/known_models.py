"""Models that specreg knows by name: what planning must know of them before anything is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["KNOWN_MODELS", "KnownModel"]


@dataclass(frozen=True)
class KnownModel:
    """A model that is fetched by name.

    Attributes:
        config: the keys of its `config.json` that planning reads.
    """

    config: Mapping[str, Any]


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": KnownModel(
            config=MappingProxyType(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "vocab_size": 49152,
                    "hidden_size": 576,
                    "num_hidden_layers": 30,
                    "num_attention_heads": 9,
                    "num_key_value_heads": 3,
                    "head_dim": 64,
                    "dtype": "float32",
                }
            )
        )
    }
)
