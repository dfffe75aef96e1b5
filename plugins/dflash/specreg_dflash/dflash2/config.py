"""What describes a DFlash2 drafter, read from either form of config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from specreg.errors import CheckpointError
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.convolution.config import ConvolutionConfig, read_convolution
from specreg_dflash.declarations import read_fill_in

__all__ = ["BEAM_ARCHITECTURE", "MAX_CANDIDATES", "DFlash2Config", "read_dflash2"]

BEAM_ARCHITECTURE = "DFlash2BeamDraftModel"
MAX_CANDIDATES = 128
"""Candidates a step that drafts can be drawn from."""

# What the library `speculators` takes where its form lacks a key; the other form must have them.
DEFAULT_BLOCK_SIZE = 8
DEFAULT_SIZES = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}


@dataclass(frozen=True)
class DFlash2Config:
    """A DFlash2 drafter.

    Attributes:
        backbone: of the drafter.
        convolution: around its sublayers.
        rank: width of the selector's tables.
        num_candidates: candidates a step.
        output_multiplier: factor on the candidates' logits, above 0.
        soft_cap: then they become `soft_cap * tanh(logit / soft_cap)`; 0 leaves them.
        is_beam: embedding and head are the target's, whatever the checkpoint holds.
    """

    backbone: BackboneConfig
    convolution: ConvolutionConfig
    rank: int
    num_candidates: int
    output_multiplier: float
    soft_cap: float
    is_beam: bool


def read_dflash2(form: ConfigForm) -> DFlash2Config:
    """Read a DFlash2 config.

    Raises:
        CheckpointError: a key that is missing, of a wrong type, contradicts another one or asks
            for what is not implemented.
    """
    section = form.section
    backbone = read_fill_in(form, block_size=DEFAULT_BLOCK_SIZE, sliding_window_non_causal=True)
    backbone.require_full_vocabulary()
    sizes = {
        key: section.integer(key, default) if form.is_speculators else section.integer(key)
        for key, default in DEFAULT_SIZES.items()
    }
    convolution = read_convolution(
        form,
        backbone.shape.hidden_size,
        kernel_size=sizes["conv_kernel_size"],
        group_size=sizes["conv_group_size"],
    )
    assert convolution is not None
    config = DFlash2Config(
        backbone=backbone,
        convolution=convolution,
        rank=sizes["selector_rank"],
        num_candidates=sizes["selector_top_k"],
        output_multiplier=1.0,
        soft_cap=section.number("final_logit_softcapping", 0.0),
        is_beam=BEAM_ARCHITECTURE in (form.top.texts("architectures") or ()),
    )
    if config.is_beam:
        _check_beam(config, section.where)
        config = replace(config, backbone=replace(backbone, embedding_scale=1.0))
    else:
        multiplier = section.number("output_multiplier", 1.0)
        config = replace(config, output_multiplier=multiplier)
    limit = min(MAX_CANDIDATES, backbone.vocab_size)
    for key, got, holds, allowed in (
        ("selector_top_k", config.num_candidates, config.num_candidates <= limit, f"1 to {limit}"),
        ("output_multiplier", config.output_multiplier, config.output_multiplier > 0, "above 0"),
        ("final_logit_softcapping", config.soft_cap, config.soft_cap >= 0, "0 for none, or above"),
    ):
        if not holds:
            _refuse(
                "the candidates of a drafter are not described",
                f"{section.where}, {key}",
                f"{got}; allowed: {allowed}",
            )
    return config


def _check_beam(config: DFlash2Config, where: str) -> None:
    shape = config.backbone.shape
    problems = {
        "layers that see the whole context": None in shape.sliding_windows,
        "causal layers": any(config.backbone.is_causal),
        "biases in attention": shape.attention_bias,
        "sinks in attention": shape.has_sinks,
        "no final_logit_softcapping": config.soft_cap <= 0,
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        _refuse(
            "a drafter of the Beam kind has what that kind does not have",
            f"{where}, architectures {BEAM_ARCHITECTURE}",
            f"{', '.join(found)}; allowed: sliding layers with is_causal false, neither biases "
            "nor sinks, and a final_logit_softcapping above 0",
        )


def _refuse(what: str, where: str, got: str) -> NoReturn:
    raise CheckpointError(
        what, where=where, got=got, fix="use the config.json that belongs to the weights"
    )
