"""What describes a LiLiCorr drafter, read from its config."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specreg.errors import CheckpointError
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.convolution.config import ConvolutionConfig, read_convolution
from specreg_dflash.declarations import read_fill_in

__all__ = ["LatticeConfig", "LiLiCorrConfig", "read_lilicorr"]

MAX_CANDIDATES = 16


@dataclass(frozen=True)
class LatticeConfig:
    """The transformer over the candidates of all steps.

    Attributes:
        hidden_size, num_heads, num_layers: its width, heads and depth.
        intermediate_size: of its feed-forward blocks.
        factor_dim: width of the unit vectors whose products score an edge.
        vector_eps: the least length that a vector is divided by.
        logit_scale: factor on those products.
        eps: of its norms.
    """

    hidden_size: int
    num_heads: int
    num_layers: int
    intermediate_size: int
    factor_dim: int
    vector_eps: float
    logit_scale: float
    eps: float


@dataclass(frozen=True)
class LiLiCorrConfig:
    """A LiLiCorr drafter.

    Attributes:
        backbone: of the drafter; its logits are not scaled.
        convolution: around its sublayers; None without any.
        num_candidates: candidates a step.
        lattice: what scores pairs of them.
    """

    backbone: BackboneConfig
    convolution: ConvolutionConfig | None
    num_candidates: int
    lattice: LatticeConfig


def read_lilicorr(form: ConfigForm) -> LiLiCorrConfig:
    """Read a LiLiCorr config.

    Raises:
        CheckpointError: a key that is missing, of a wrong type, contradicts another one or asks
            for what is not implemented.
    """
    section = form.section
    form.reader_of("block_size").integer("block_size", minimum=2)
    backbone = read_fill_in(form)
    backbone.require_full_vocabulary()
    hidden_size = section.integer("lilicorr_hidden_size", 0, minimum=0)
    hidden_size = hidden_size or backbone.shape.hidden_size
    lattice = LatticeConfig(
        hidden_size=hidden_size,
        num_heads=section.integer("lilicorr_num_heads"),
        num_layers=section.integer("lilicorr_num_layers"),
        intermediate_size=int(hidden_size * section.number("lilicorr_mlp_ratio")),
        factor_dim=section.integer("lilicorr_factor_dim"),
        vector_eps=section.number("lilicorr_vector_eps"),
        logit_scale=section.number("lilicorr_logit_scale"),
        eps=backbone.shape.eps,
    )
    num_candidates = section.integer("lilicorr_candidate_topk")
    is_power_of_two = num_candidates & (num_candidates - 1) == 0
    limit = min(MAX_CANDIDATES, backbone.vocab_size)
    is_enabled = section.flag("lilicorr_enabled", True)
    for key, got, holds, allowed in (
        (
            "lilicorr_candidate_topk",
            num_candidates,
            is_power_of_two and num_candidates <= limit,
            f"a power of two, at most {limit}",
        ),
        (
            "lilicorr_num_heads",
            lattice.num_heads,
            hidden_size % lattice.num_heads == 0,
            f"a divisor of the lattice's width {hidden_size}",
        ),
        ("lilicorr_mlp_ratio", lattice.intermediate_size, lattice.intermediate_size > 0, "above 0"),
        ("lilicorr_vector_eps", lattice.vector_eps, lattice.vector_eps > 0, "above 0"),
        ("lilicorr_logit_scale", lattice.logit_scale, lattice.logit_scale > 0, "above 0"),
        ("lilicorr_enabled", str(is_enabled).lower(), is_enabled, "true"),
    ):
        if not holds:
            raise CheckpointError(
                "the lattice of a drafter is not described",
                where=f"{section.where}, {key}",
                got=f"{got}; allowed: {allowed}",
                fix="use the config.json that belongs to the weights",
            )
    return LiLiCorrConfig(
        backbone=replace(backbone, logit_scale=1.0),
        convolution=read_convolution(form, backbone.shape.hidden_size),
        num_candidates=num_candidates,
        lattice=lattice,
    )
