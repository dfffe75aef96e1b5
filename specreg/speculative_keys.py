"""Every key of `vllm serve --speculative-config`, and what specreg does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from specreg.errors import ConfigError

__all__ = ["SPECULATIVE_KEYS", "KeyUse", "SpeculativeKey"]


class KeyUse(str, Enum):
    """What specreg does with a key; a value of null is accepted for every one of them."""

    ACTED_ON = "acted on"
    ACCEPTED = "accepted when it states what specreg does anyway"
    PLUGIN_OPTION = "handed to the speculator that declares it"
    REFUSED = "refused"


@dataclass(frozen=True)
class SpeculativeKey:
    """One row of the table.

    Attributes:
        use: what is done with the key.
        reason: why another value than the accepted ones is refused.
        accepts: values, besides null, that state what specreg does anyway.
    """

    use: KeyUse
    reason: str = ""
    accepts: tuple[Any, ...] = ()

    def admit(self, key: str, value: Any) -> None:
        """Raise `ConfigError` with the reason unless `value` states what specreg does anyway."""
        if any(type(value) is type(known) and value == known for known in self.accepts):
            return
        allowed = ", ".join(["null", *map(repr, self.accepts)])
        raise ConfigError(
            f"the key {key!r} asks for something that specreg does not do: {self.reason}",
            where=f"speculative_config.{key}",
            got=f"{value!r}; allowed: {allowed}",
            fix="remove the key",
        )


_ACTED_ON = SpeculativeKey(KeyUse.ACTED_ON)
_OPTION = SpeculativeKey(KeyUse.PLUGIN_OPTION)


def _accepted(reason: str, *values: Any) -> SpeculativeKey:
    return SpeculativeKey(KeyUse.ACCEPTED, reason, values)


def _refused(reason: str) -> SpeculativeKey:
    return SpeculativeKey(KeyUse.REFUSED, reason)


_INJECTED = _refused("it is filled in by the serving engine, not by a user")
_FLY = _refused("entropy-gated acceptance changes the target's distribution")
_LOCAL_FILES = _refused("checkpoints are read from local directories as they are")
_PREFIX_CACHE = _accepted("there is no prefix cache to tune", False)

SPECULATIVE_KEYS: Mapping[str, SpeculativeKey] = MappingProxyType(
    {
        "method": _ACTED_ON,
        "model": _ACTED_ON,
        "num_speculative_tokens": _ACTED_ON,
        "draft_sample_method": _ACTED_ON,
        "rejection_sample_method": _ACTED_ON,
        "synthetic_acceptance_rates": _ACTED_ON,
        "synthetic_acceptance_length": _ACTED_ON,
        "max_model_len": _ACTED_ON,
        # Fields of the config too: the run's tp size and the speculator's style decide on them.
        "draft_tensor_parallel_size": SpeculativeKey(KeyUse.ACCEPTED),
        "parallel_drafting": SpeculativeKey(KeyUse.ACCEPTED),
        "tensor_parallel_size": _refused("the drafter runs on the ranks of the target"),
        "num_speculative_tokens_per_batch_size": _refused("K is the same for every batch size"),
        "enforce_eager": _ACTED_ON,
        "quantization": _refused("draft weights are loaded unquantised"),
        "draft_lm_head_quantization": _refused("draft weights are loaded unquantised"),
        "revision": _LOCAL_FILES,
        "code_revision": _LOCAL_FILES,
        "draft_load_config": _LOCAL_FILES,
        "moe_backend": _accepted("draft layers use the backends of the target", "auto"),
        "attention_backend": _accepted("draft layers use the backends of the target", "auto"),
        "kv_cache_dtype": _accepted("draft KV is kept in the dtype of the run", "auto"),
        "use_local_argmax_reduction": _accepted(
            "every rank samples drafts from full-width logits", False
        ),
        "use_heterogeneous_vocab": _accepted("drafter and target share one tokenizer", False),
        "disable_padded_drafter_batch": _accepted(
            "rejected rows are masked, never compacted on the host", False
        ),
        "disable_eagle_block_drop": _PREFIX_CACHE,
        "disable_lookahead_block_hashes": _PREFIX_CACHE,
        "enable_adaptive_verification": _accepted("every draft token is verified", False),
        "fly_window_size": _FLY,
        "fly_entropy_threshold": _FLY,
        "fly_entropy_top_k": _FLY,
        "index_share_for_mtp_iteration": _OPTION,
        "dspark_draft_topk": _OPTION,
        "xpress_topc": _OPTION,
        "prompt_lookup_min": _OPTION,
        "prompt_lookup_max": _OPTION,
        "suffix_decoding_max_tree_depth": _OPTION,
        "suffix_decoding_max_cached_requests": _OPTION,
        "suffix_decoding_max_spec_factor": _OPTION,
        "suffix_decoding_min_token_prob": _OPTION,
        "target_model_config": _INJECTED,
        "target_parallel_config": _INJECTED,
        "draft_model_config": _INJECTED,
        "draft_parallel_config": _INJECTED,
    }
)
