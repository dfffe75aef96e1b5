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

    from specreg.nn.mlp import GatedMLP
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
        has_head_gates: a sigmoid gate a head, a projection of its own, scales the output.
        has_zero_centred_norms: norms scale by `1 + weight`.
        sliding_windows: keys visible to a query a layer, itself included; None means all.
        attention_scale: factor on `query @ key`; 0 stands for the usual root of `head_dim`.
        value_scale: factor on the values.
        has_sinks: a learnt logit a head joins each softmax without a value.
        rope: the config keys that describe the rotary embedding.
        where: of the config, for errors.
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
    has_head_gates: bool = False
    has_zero_centred_norms: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    attention_scale: float = 0.0
    value_scale: float = 1.0
    has_sinks: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="config.json", compare=False)

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    @classmethod
    def read(cls, config: ConfigReader, **known: Any) -> DecoderShape:
        """Read a Llama-style config: what Llama, Mistral, Qwen2 and Qwen3 write.

        Layers have windows where `layer_types` says `sliding_attention`. Without `layer_types`, a
        `sliding_window` holds for every layer (Mistral), for those from `max_window_layers` on if
        `use_sliding_window` turns it on (Qwen), or for none (Llama).

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
        if head_dim == 0:
            raise _unfit(
                config, f"hidden_size {hidden_size}, num_attention_heads {num_heads}", "fewer heads"
            )
        num_kv_heads = config.integer("num_key_value_heads", None) or num_heads
        if num_heads % num_kv_heads:
            raise _unfit(
                config,
                f"num_attention_heads {num_heads}, num_key_value_heads {num_kv_heads}",
                "a multiple",
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
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "eps": config.number("rms_norm_eps", 1e-6),
            "act": config.text("hidden_act", "silu"),
            "attention_bias": bias,
            "attention_output_bias": bias,
            "mlp_bias": config.flag("mlp_bias", False),
            "rope": rope,
            "where": config.where,
        }
        if "intermediate_size" not in known:
            fields["intermediate_size"] = config.integer("intermediate_size")
        if "sliding_windows" not in known:
            fields["sliding_windows"] = _sliding_windows(config, num_layers)
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

    def mlp(self) -> GatedMLP:
        """A gated feed-forward block of its sizes. Raises `CheckpointError`."""
        from specreg.nn.mlp import GatedMLP

        return GatedMLP(
            self.hidden_size, self.intermediate_size, self.act, bias=self.mlp_bias, where=self.where
        )

    def rotary(self, device: torch.device | str) -> Rotary:
        """Its rotary embedding. Raises `CheckpointError`."""
        from specreg.nn.rotary import Rotary

        return Rotary.from_config(self.rope, self.head_dim, device, self.where)


def _unfit(config: ConfigReader, got: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        "the heads of a config do not fit each other",
        where=config.where,
        got=f"{got}; allowed: {allowed}",
        fix="use the config.json that belongs to the weights",
    )


def _sliding_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    types = config.texts("layer_types")
    if types is None:
        return _untyped_windows(config, num_layers)
    window = config.integer("sliding_window", None)
    config.accept("use_sliding_window", "max_window_layers")
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


def _untyped_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Without `layer_types`, what a window means depends on the model."""
    model_type = config.text("model_type", "")
    if model_type == "llama":  # has no windows: a key for one is told as not read
        if not config.get("use_sliding_window", False):
            config.accept("max_window_layers")
        return (None,) * num_layers
    is_qwen = model_type.startswith("qwen")
    window = config.integer("sliding_window", None)
    is_used = config.flag("use_sliding_window", not is_qwen)
    first = config.integer("max_window_layers", 28 if is_qwen else 0, minimum=0)
    return tuple(window if is_used and layer >= first else None for layer in range(num_layers))
