"""Rotary position embedding, half-split, with the frequencies that a config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError, MissingDependencyError

__all__ = ["Rotary", "RotaryAngles"]

DEFAULT_THETA = 10_000.0
# Three rows of positions, for pictures (mrope), are all the same in a text.
PLAIN = ("default", "mrope")
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
        cls,
        config: Mapping[str, Any],
        head_dim: int,
        device: torch.device | str,
        where: str = "config.json",
    ) -> Rotary:
        """The embedding that a decoder's config describes.

        Args:
            config: with `rope_parameters`, or the older `rope_theta`, `rope_scaling` and
                `partial_rotary_factor`. For a model with one set a layer type, pass a config whose
                `rope_parameters` is that of the type.
            head_dim: elements a head.
            device: of the frequencies.
            where: of the config, for errors.

        Raises:
            CheckpointError: a setting of a wrong type or out of range; a kind that is not known, or
                depends on the sequence's length; settings of several layer types.
            MissingDependencyError: a scaled kind without `transformers`.
        """
        outer = ConfigReader(config, where)
        older, newer = outer.section("rope_scaling"), outer.section("rope_parameters")
        rope = {**older.config, **newer.config}
        if by_type := [name for name, value in rope.items() if isinstance(value, Mapping)]:
            raise CheckpointError(
                "a config has a rotary embedding a layer type where one for all is read",
                where=newer.where,
                got=f"objects named {', '.join(by_type)}; allowed: the settings of one embedding",
                fix="use a checkpoint whose layers share one rotary embedding",
            )
        inner = ConfigReader(rope, newer.where)
        kind = inner.text("rope_type", None) or inner.text("type", "default")
        theta = inner.number("rope_theta", outer.number("rope_theta", DEFAULT_THETA))
        factor = inner.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0))
        width = _width(head_dim, theta, factor, newer.where)
        if kind in PLAIN:
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
            return cls(1.0 / theta**exponents)
        settings = {key: value for key, value in rope.items() if key != "type"}
        settings |= {"rope_type": kind, "rope_theta": theta}
        if "partial_rotary_factor" in inner or "partial_rotary_factor" in outer:
            settings["partial_rotary_factor"] = factor
        return cls(*_scaled(settings, config, head_dim, device, newer.where))

    def __call__(self, positions: Tensor) -> RotaryAngles:
        """Angles of `positions`, int64 `[n]`, in fp32."""
        angles = positions.float()[:, None, None] * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return RotaryAngles(angles.cos() * self.scaling, angles.sin() * self.scaling)


def _width(head_dim: int, theta: float, factor: float, where: str) -> int:
    """Elements of a head that turn, of which there must be pairs."""
    width = int(head_dim * factor) if 0 < factor <= 1 else 0
    if width < 2 or width % 2 or theta <= 0:
        raise CheckpointError(
            "a config describes no rotary embedding",
            where=where,
            got=f"rope_theta {theta:g}, and partial_rotary_factor {factor:g} of {head_dim} "
            "elements; allowed: a positive number, and an even number of elements",
            fix="use the config.json that belongs to the weights",
        )
    return width


def _scaled(
    rope: Mapping[str, Any],
    config: Mapping[str, Any],
    head_dim: int,
    device: torch.device | str,
    where: str,
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
    kind = rope["rope_type"]
    if kind not in ROPE_INIT_FUNCTIONS or kind in BY_LENGTH:
        allowed = sorted({*PLAIN, *ROPE_INIT_FUNCTIONS} - set(BY_LENGTH))
        raise CheckpointError(
            "a config names a kind of rotary embedding that drafters cannot use",
            where=f"{where}, rope_type",
            got=f"{kind!r}; allowed: {', '.join(allowed)}",
            fix="use a checkpoint with one of these",
        )
    names = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    known = {name: config[name] for name in names if name in config}
    make: Any = PretrainedConfig
    try:
        described = make(**known, head_dim=head_dim, rope_parameters=dict(rope))
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](described, torch.device(device))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "the rotary embedding of a config is not complete",
            where=where,
            got=f"{dict(rope)!r}: {type(error).__name__}: {error}",
            fix="use the config.json that belongs to the weights",
        ) from error
    return frequencies.float(), float(scaling)
