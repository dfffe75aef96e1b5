"""The sizes and choices that describe a dense decoder, read from a `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specreg.capabilities import KVLayerSpec
from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from specreg.nn.norms import RMSNorm
    from specreg.nn.rotary import Rotary

__all__ = ["DecoderShape"]


@dataclass(frozen=True)
class DecoderShape:
    """A dense decoder's sizes. Importing and reading it needs no torch.

    Attributes:
        hidden_size, intermediate_size, num_layers: widths and depth.
        num_heads, num_kv_heads, head_dim: of attention.
        eps: of the norms.
        act: name of the activation.
        attention_bias: whether queries, keys and values have a bias.
        attention_output_bias: whether the output projection has one.
        mlp_bias: whether the feed-forward projections have one.
        has_head_norms: queries and keys are normalised a head.
        has_gated_attention: a sigmoid gate, projected beside the queries, scales the output.
        has_zero_centred_norms: norms scale by `1 + weight`.
        sliding_windows: keys visible to a query a layer, itself included; None means all.
        attention_scale: factor on `query @ key`; 0 stands for the usual root of `head_dim`.
        rope: the config keys that describe the rotary embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    act: str = "silu"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    has_head_norms: bool = False
    has_gated_attention: bool = False
    has_zero_centred_norms: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    attention_scale: float = 0.0
    rope: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    @classmethod
    def read(cls, config: ConfigReader, **known: Any) -> DecoderShape:
        """Read a Llama-style config: what Llama, Mistral, Qwen2 and Qwen3 write.

        Layers have windows where `layer_types` says `sliding_attention`, and all of them where
        there are no `layer_types` but a `sliding_window` that `use_sliding_window` does not turn
        off.

        Args:
            config: the object that describes the decoder.
            known: fields that the caller decides, whatever the config says.

        Raises:
            CheckpointError: a size is missing or no number, or sizes do not fit each other.
        """
        hidden_size = config.integer("hidden_size")
        num_heads = config.integer("num_attention_heads")
        num_layers = known.get("num_layers") or config.integer("num_hidden_layers")
        head_dim = config.integer("head_dim", None) or hidden_size // num_heads
        num_kv_heads = config.integer("num_key_value_heads", None) or num_heads
        if num_heads % num_kv_heads:
            raise CheckpointError(
                "the heads of a config do not fit each other",
                where=config.where,
                got=f"num_attention_heads {num_heads}, num_key_value_heads {num_kv_heads}; "
                "allowed: a multiple",
                fix="use the config.json that belongs to the weights",
            )
        rope_keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        rope = {key: config.get(key) for key in rope_keys if key in config}
        rope |= {
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "max_position_embeddings": config.integer("max_position_embeddings", 2048),
        }
        bias = config.flag("attention_bias", False)
        fields: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": config.integer("intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "eps": config.number("rms_norm_eps", 1e-6),
            "act": config.text("hidden_act", "silu"),
            "attention_bias": bias,
            "attention_output_bias": bias,
            "mlp_bias": config.flag("mlp_bias", False),
            "sliding_windows": _sliding_windows(config, num_layers),
            "rope": rope,
        }
        return cls(**{**fields, **known})

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """What the host must allocate: one a layer, in the run's dtype."""
        return tuple(
            KVLayerSpec(self.num_kv_heads, self.head_dim, sliding_window=window)
            for window in self.sliding_windows
        )

    def norm(self, size: int | None = None) -> RMSNorm:
        """A norm of this decoder's kind over `size` elements; None is the hidden size."""
        from specreg.nn.norms import RMSNorm

        width = self.hidden_size if size is None else size
        return RMSNorm(width, self.eps, is_zero_centred=self.has_zero_centred_norms)

    def rotary(self, device: torch.device | str) -> Rotary:
        """Its rotary embedding. Raises `CheckpointError`."""
        from specreg.nn.rotary import Rotary

        return Rotary.from_config(self.rope, self.head_dim, device)


def _sliding_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = config.integer("sliding_window", None)
    types = config.texts("layer_types")
    is_used = config.flag("use_sliding_window", True)
    config.accept("max_window_layers")
    if types is None:
        return (window if is_used else None,) * num_layers
    if len(types) < num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            "the layer types of a config do not describe its layers",
            where=f"{config.where}, layer_types",
            got=f"{list(types)} for {num_layers} layers; allowed: full_attention or "
            "sliding_attention a layer",
            fix="use the config.json that belongs to the weights",
        )
    sliding = [kind == "sliding_attention" for kind in types[:num_layers]]
    if any(sliding) and window is None:
        config.integer("sliding_window")
    return tuple(window if is_sliding else None for is_sliding in sliding)
