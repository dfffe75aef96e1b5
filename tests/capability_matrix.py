"""What every run must come to, written by hand: one table, and the kinds of speculators in it.

A combination of the axes belongs to the first row that matches it. That row says what becomes of
the draft-logits cache; the rules that fail are those that any matching row names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["AXES", "FUSED_SAMPLERS", "KINDS", "REGISTERED", "TABLE", "Kind", "Named", "Row"]

# The cartesian product of these, less what cannot be: slots below one rank.
AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sampling": ("probabilistic", "greedy"),
        "batch_sharded": ("on", "off"),
        "tp": ("1", "2", "4"),
        "slots": ("enough", "below tp"),
        "watermarker": ("none", "masked", "unmasked"),
        "sampler": ("stock", "declared", "custom"),
        "sharding": ("auto", "require", "off"),
        "layout": ("auto", "dense", "draft_vocab", "top_k"),
        # What loading brings: nothing yet, all that is hoped for, or one disappointment.
        "loading": ("not yet", "all hold", "no local logits", "opt-in withdrawn"),
    }
)


@dataclass(frozen=True)
class Kind:
    """What a speculator is like.

    Attributes:
        layouts: width and bytes an element of each layout that it writes, the smallest first.
    """

    layouts: Mapping[str, tuple[int, int]]


VOCAB_SIZE, DRAFT_VOCAB_SIZE, NUM_CANDIDATES = 1009, 101, 8
_DENSE = {"dense": (VOCAB_SIZE, 2)}
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "dense": Kind(_DENSE),
        "argmax only": Kind(_DENSE),
        "unmasked": Kind(_DENSE),
        "dense in fp32": Kind({"dense": (VOCAB_SIZE, 4)}),
        "reduced": Kind({"draft_vocab": (DRAFT_VOCAB_SIZE, 2), **_DENSE}),
        "candidates": Kind({"top_k": (NUM_CANDIDATES, 4), "dense": (VOCAB_SIZE, 4)}),
        "candidates only": Kind({"top_k": (NUM_CANDIDATES, 4)}),
    }
)


@dataclass(frozen=True)
class Row:
    """One reason.

    Attributes:
        reason: why the combinations of this row come to what they come to.
        when: values an axis may have, and `kind`; an axis that is not named may have any.
        cache: `sharded`, `replicated`, `none`, or `refused` where the run cannot be.
        layout: of the cache; `wanted` is the one that was named, or the smallest for `auto`.
        rule: policy rule that fails in these combinations.
    """

    reason: str
    when: Mapping[str, str | tuple[str, ...]]
    cache: str
    layout: str | None = None
    rule: str | None = None

    def matches(self, combination: Mapping[str, str]) -> bool:
        return all(
            combination[axis] == allowed
            if isinstance(allowed, str)
            else combination[axis] in allowed
            for axis, allowed in self.when.items()
        )


PROBABILISTIC, BATCH_SHARDED, OPTS_IN, WATERMARKER, SAMPLER = (
    "probabilistic-drafts",
    "batch-sharded-sampling",
    "speculator-opts-in",
    "no-draft-watermarker",
    "stock-rejection-sampler",
)
_REQUIRED = {"sharding": "require"}
_ALL_DENSE = ("dense", "unmasked", "dense in fp32")


def _refused(reason: str, rule: str, **when: str) -> Row:
    return Row(f"required, but {reason}", _REQUIRED | when, "refused", rule=rule)


def _impossible(reason: str, **when: str | tuple[str, ...]) -> Row:
    return Row(reason, when, "refused")


def _replicated(reason: str, rule: str | None, layout: str = "wanted", **when: str) -> Row:
    return Row(reason, when, "replicated", layout, rule)


def _sharded(reason: str, **when: str) -> Row:
    return Row(reason, when, "sharded", "wanted")


TABLE = (
    _refused("drafts are greedy", PROBABILISTIC, sampling="greedy"),
    _refused("the speculator only takes the argmax", PROBABILISTIC, kind="argmax only"),
    _refused("sampling is not batch-sharded", BATCH_SHARDED, batch_sharded="off"),
    _refused("there is one rank", BATCH_SHARDED, tp="1"),
    _refused("there are fewer slots than ranks", BATCH_SHARDED, slots="below tp"),
    _refused("the speculator writes every row", OPTS_IN, kind="unmasked"),
    _refused("the watermarker writes every row", WATERMARKER, watermarker="unmasked"),
    _refused("the sampler reads a whole cache", SAMPLER, sampler="custom"),
    _refused("the target gives no local logits", BATCH_SHARDED, loading="no local logits"),
    _refused("the loaded speculator declines", OPTS_IN, loading="opt-in withdrawn"),
    Row("greedy drafts", {"sampling": "greedy"}, "none", rule=PROBABILISTIC),
    Row("only the argmax", {"kind": "argmax only"}, "none", rule=PROBABILISTIC),
    _impossible("no layout in common", kind="candidates only", sampler="custom"),
    _impossible("the sampler reads no reduced vocabulary", sampler="custom", layout="draft_vocab"),
    _impossible("the sampler reads no candidates", sampler="custom", layout="top_k"),
    _impossible("its vocabulary is the target's", kind=_ALL_DENSE, layout="draft_vocab"),
    _impossible("it scores every column", kind=_ALL_DENSE, layout="top_k"),
    _impossible("it scores every column of its own", kind="reduced", layout="top_k"),
    _impossible(
        "candidates are of the target's vocabulary",
        kind=("candidates", "candidates only"),
        layout="draft_vocab",
    ),
    _impossible("it writes no dense rows", kind="candidates only", layout="dense"),
    _replicated("the sampler declares nothing", SAMPLER, "dense", sampler="custom"),
    _replicated("the control arm", None, sharding="off"),
    _replicated("sampling is not batch-sharded", BATCH_SHARDED, batch_sharded="off"),
    _replicated("one rank", BATCH_SHARDED, tp="1"),
    _replicated("fewer slots than ranks", BATCH_SHARDED, slots="below tp"),
    _replicated("the speculator writes every row", OPTS_IN, kind="unmasked"),
    _replicated("the watermarker writes every row", WATERMARKER, watermarker="unmasked"),
    _replicated("the target gives no local logits", BATCH_SHARDED, loading="no local logits"),
    _replicated("the loaded speculator declines", OPTS_IN, loading="opt-in withdrawn"),
    _sharded("the watermarker honours the owner mask", watermarker="masked"),
    _sharded("the sampler declares what it reads", sampler="declared"),
    _sharded("required and possible", sharding="require"),
    _sharded("nothing speaks against it before loading", loading="not yet"),
    _sharded("every rule holds", loading="all hold"),
)


@dataclass(frozen=True)
class Named:
    """A speculator that is installed with specreg.

    Attributes:
        kind: key of `KINDS`.
        draft_config: of a checkpoint that selects it, sized like the kind.
        exceptions: rows tried before those of the table.
    """

    kind: str
    draft_config: Mapping[str, Any] = field(default_factory=dict)
    exceptions: tuple[Row, ...] = ()


BLOCK_DRAFTER: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
    }
)
DFLASH2: Mapping[str, Any] = MappingProxyType(
    {
        **BLOCK_DRAFTER,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            **BLOCK_DRAFTER["dflash_config"],
            "conv_kernel_size": 2,
            "conv_group_size": 4,
            "selector_rank": 4,
            "selector_top_k": NUM_CANDIDATES,
        },
    }
)
DSPARK: Mapping[str, Any] = MappingProxyType(
    {
        **BLOCK_DRAFTER,
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 2,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
    }
)
LILICORR: Mapping[str, Any] = MappingProxyType(
    {
        **BLOCK_DRAFTER,
        "architectures": ["LiLiCorrDraftModel"],
        "dflash_config": {
            **BLOCK_DRAFTER["dflash_config"],
            "lilicorr_candidate_topk": NUM_CANDIDATES,
            "lilicorr_num_heads": 1,
            "lilicorr_num_layers": 1,
            "lilicorr_mlp_ratio": 2.0,
            "lilicorr_factor_dim": 4,
            "lilicorr_vector_eps": 1e-6,
            "lilicorr_logit_scale": 1.0,
        },
    }
)
REDUCED: Mapping[str, Any] = MappingProxyType(
    {"vocab_size": VOCAB_SIZE, "draft_vocab_size": DRAFT_VOCAB_SIZE}
)
THREE_MODULES: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "glm4_moe",
        "num_nextn_predict_layers": 3,
        "hidden_size": 8,
        "num_attention_heads": 2,
    }
)
REGISTERED: Mapping[str, Named] = MappingProxyType(
    {
        "dflash": Named("dense", BLOCK_DRAFTER),
        "dflash2": Named("candidates", DFLASH2),
        "draft_model": Named("dense"),
        "dspark": Named("reduced", DSPARK),
        "eagle": Named("dense"),
        "eagle3": Named("reduced", REDUCED),
        "gemma4": Named("dense", {"model_type": "gemma4_assistant"}),
        "lilicorr": Named("candidates", LILICORR),
        "mtp": Named("dense"),
        "multi_module_mtp": Named("dense", THREE_MODULES),
        "ngram": Named("argmax only"),
        "peagle": Named("reduced", {**REDUCED, "architectures": ["PEagleDraftModel"]}),
        "xpress": Named("argmax only", {**BLOCK_DRAFTER, "architectures": ["Qwen3XPressModel"]}),
    }
)

# What loading brings with each fused sampler of a DSpark drafter, by the number of ranks. A single
# rank has every request, so nothing that is written there is a lie.
FUSED_SAMPLERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "markov_sample": {"1": "all hold", "2": "all hold", "4": "all hold"},
        "owner_aware": {"1": "all hold", "2": "all hold", "4": "all hold"},
        "full_cache": dict.fromkeys(("1", "2", "4"), "opt-in withdrawn"),
        "lying": {"1": "all hold", "2": "opt-in withdrawn", "4": "opt-in withdrawn"},
    }
)
