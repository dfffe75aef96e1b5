"""Rotary position embedding, half-split, with the frequencies that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specreg.errors import CheckpointError, MissingDependencyError

__all__ = ["Rotary", "RotaryAngles"]

DEFAULT_THETA = 10_000.0
# Their frequencies depend on the length of the sequence, which differs from row to row here.
BY_LENGTH = ("dynamic", "longrope")


class RotaryAngles(NamedTuple):
    """Cosine and sine of each row's angles, `[n, 1, rotary_dim]` each, for `apply`."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the first `rotary_dim` elements of each head of `x [n, num_heads, head_dim]`."""
        width = self.cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        first, second = turned.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        turned = turned * self.cos.to(x.dtype) + swapped * self.sin.to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Rotary:
    """Angles by position. Not a module: it has nothing that a checkpoint could hold.

    Args:
        inverse_frequencies: fp32 `[rotary_dim / 2]`.
        scaling: factor on cosine and sine.
    """

    def __init__(self, inverse_frequencies: Tensor, scaling: float = 1.0) -> None:
        self.inverse_frequencies, self.scaling = inverse_frequencies, scaling

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], head_dim: int, device: torch.device | str
    ) -> Rotary:
        """The embedding that a decoder's config describes.

        Args:
            config: with `rope_parameters`, or the older `rope_theta`, `rope_scaling` and
                `partial_rotary_factor`. For a model with one set a layer type, pass a config whose
                `rope_parameters` is that of the type.
            head_dim: elements a head.
            device: of the frequencies.

        Raises:
            CheckpointError: a kind that is not known, or depends on the sequence's length; settings
                of several layer types.
            MissingDependencyError: a scaled kind without `transformers`.
        """
        rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        if by_type := [name for name, value in rope.items() if isinstance(value, Mapping)]:
            raise CheckpointError(
                "a config has a rotary embedding a layer type where one for all is read",
                where="rope_parameters",
                got=f"objects named {', '.join(by_type)}; allowed: the settings of one embedding",
                fix="use a checkpoint whose layers share one rotary embedding",
            )
        legacy_kind = rope.pop("type", None)
        kind = str(rope.setdefault("rope_type", legacy_kind or "default"))
        rope.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
        if config.get("partial_rotary_factor") is not None:
            rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
        if kind == "default":
            width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
            return cls(1.0 / rope["rope_theta"] ** exponents)
        return cls(*_scaled(kind, {**config, "rope_parameters": rope}, head_dim, device))

    def __call__(self, positions: Tensor) -> RotaryAngles:
        """Angles of `positions`, int64 `[n]`, in fp32."""
        angles = positions.float()[:, None, None] * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return RotaryAngles(angles.cos() * self.scaling, angles.sin() * self.scaling)


def _scaled(
    kind: str, config: Mapping[str, Any], head_dim: int, device: torch.device | str
) -> tuple[Tensor, float]:
    """Frequencies and scaling of one of the kinds that `transformers` computes."""
    try:
        from transformers import PretrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    except ImportError as error:
        raise MissingDependencyError(
            "scaled rotary embeddings cannot be computed",
            where="transformers",
            got=f"{error}; allowed: transformers >= 5.0",
            fix="pip install 'specreg[runtime]'",
        ) from error
    if kind not in ROPE_INIT_FUNCTIONS or kind in BY_LENGTH:
        allowed = sorted({"default", *ROPE_INIT_FUNCTIONS} - set(BY_LENGTH))
        raise CheckpointError(
            "a config names a kind of rotary embedding that drafters cannot use",
            where="rope_parameters, rope_type",
            got=f"{kind!r}; allowed: {', '.join(allowed)}",
            fix="use a checkpoint with one of these",
        )
    names = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    known = {name: config[name] for name in names if name in config}
    make: Any = PretrainedConfig
    try:
        described = make(
            **known, head_dim=head_dim, rope_parameters=dict(config["rope_parameters"])
        )
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](described, torch.device(device))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "the rotary embedding of a config is not complete",
            where="rope_parameters",
            got=f"{dict(config['rope_parameters'])!r}: {type(error).__name__}: {error}",
            fix="use the config.json that belongs to the weights",
        ) from error
    return frequencies.float(), float(scaling)
