"""What a speculator declares before any weight is loaded: plain, frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from specreg.errors import PluginError

__all__ = [
    "CacheDtype",
    "Capabilities",
    "DraftLogitsLayout",
    "DraftingStyle",
    "FusedSampling",
    "HiddenStates",
    "KVLayerSpec",
    "TargetNeeds",
]


class DraftingStyle(str, Enum):
    """How the K tokens of a proposal depend on each other."""

    AUTOREGRESSIVE = "autoregressive"
    PARALLEL = "parallel"
    SEMI_AUTOREGRESSIVE = "semi_autoregressive"
    RETRIEVAL = "retrieval"


class DraftLogitsLayout(str, Enum):
    """What a (row, step) of the draft-logits cache holds."""

    DENSE = "dense"
    DRAFT_VOCAB = "draft_vocab"
    TOP_K = "top_k"


class CacheDtype(str, Enum):
    """Element type of stored logits: the draft head's own, or fp32."""

    MODEL = "model"
    FLOAT32 = "float32"


class FusedSampling(str, Enum):
    """Whether a speculator samples inside its own kernels, and how these write the cache."""

    NONE = "none"
    FULL_CACHE = "full_cache"
    SHARDED = "sharded"


class HiddenStates(str, Enum):
    """Which hidden state of the target a speculator reads for each token."""

    NONE = "none"
    POST_NORM = "post_norm"
    PRE_NORM = "pre_norm"


@dataclass(frozen=True)
class Capabilities:
    """Static facts about a speculator. The defaults are the safe answers.

    Attributes:
        style: how the tokens of a proposal depend on each other.
        supports_probabilistic: can draw drafts from its distribution, not only take the argmax.
        honors_owner_mask: every cache write goes through the owner mask.
        layouts: draft-logits layouts it can write.
        cache_dtype: element type of the logits that it stores.
        fused_sampling: whether it samples in its own kernels, and how those write the cache.
        supports_watermarker: works with a draft watermarker.
        is_cuda_graph_safe: `draft` may be captured in a CUDA graph.
        draft_vocab_size: columns of its own head when fewer than the target's; None means equal.
        num_candidates: candidates a step (`k` of `top_k`); None when it scores every column.
        max_num_speculative_tokens: draft tokens a step that it can propose at most; None is any
            number.
    """

    style: DraftingStyle
    supports_probabilistic: bool = False
    honors_owner_mask: bool = False
    layouts: frozenset[DraftLogitsLayout] = frozenset({DraftLogitsLayout.DENSE})
    cache_dtype: CacheDtype = CacheDtype.MODEL
    fused_sampling: FusedSampling = FusedSampling.NONE
    supports_watermarker: bool = False
    is_cuda_graph_safe: bool = False
    draft_vocab_size: int | None = None
    num_candidates: int | None = None
    max_num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("style", DraftingStyle),
            ("cache_dtype", CacheDtype),
            ("fused_sampling", FusedSampling),
            ("supports_probabilistic", bool),
            ("honors_owner_mask", bool),
            ("supports_watermarker", bool),
            ("is_cuda_graph_safe", bool),
        ):
            self._check(name, isinstance(getattr(self, name), kind), f"a {kind.__name__}")
        is_set = isinstance(self.layouts, frozenset)
        holds = is_set and all(isinstance(item, DraftLogitsLayout) for item in self.layouts)
        self._check("layouts", holds, "a frozenset of DraftLogitsLayout, empty for none")
        for name in ("draft_vocab_size", "num_candidates", "max_num_speculative_tokens"):
            value = getattr(self, name)
            is_count = value is None or (type(value) is int and value > 0)
            self._check(name, is_count, "None, or an integer above 0")

    def _check(self, field: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise PluginError(
                "capabilities are not declared correctly",
                where=f"Capabilities.{field}",
                got=f"{getattr(self, field)!r}; allowed: {allowed}",
                fix="correct the declaration in the plugin",
            )


@dataclass(frozen=True)
class KVLayerSpec:
    """One draft attention layer whose keys and values the host allocates.

    Attributes:
        num_kv_heads: key/value heads.
        head_dim: elements a head of the keys.
        dtype: element type by name, such as `"bfloat16"`; None means the run's dtype.
        sliding_window: keys visible to a query, itself included; None means all.
        value_head_dim: elements a head of the values; None means `head_dim`.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str | None = None
    sliding_window: int | None = None
    value_head_dim: int | None = None


@dataclass(frozen=True)
class TargetNeeds:
    """What a speculator reads from its host each step.

    Attributes:
        hidden_states: hidden state of the target for each token.
        aux_layer_ids: entry ids 0..L; id `e` is the un-normed residual stream that enters layer
            `e`, `L` the stream before the final norm.
        prefill_lookahead: prompt tokens beyond the present chunk (0, 1 or K).
        needs_token_history: wants every token of a request so far.
        target_kv_layers: target layers whose KV it reads.
        kv_specs: its own attention layers, in the order of `KVView`'s layer index.
    """

    hidden_states: HiddenStates = HiddenStates.NONE
    aux_layer_ids: tuple[int, ...] = ()
    prefill_lookahead: int = 0
    needs_token_history: bool = False
    target_kv_layers: tuple[int, ...] = ()
    kv_specs: tuple[KVLayerSpec, ...] = ()
