"""What tensors of EAGLE checkpoints are called, and which of them nothing needs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from types import MappingProxyType

from specreg.errors import CheckpointError
from specreg.nn.shape import DecoderShape
from specreg.nn.vocabulary_ends import VocabularyEnds
from specreg.weights import Ignored

__all__ = ["ENDS_ABSENT", "common_name", "settle_attention_biases"]

ENDS = ("embed_tokens.weight", "lm_head.weight", "d2t")
ENDS_ABSENT: Mapping[str, str] = MappingProxyType(
    {f"ends.{name}": reason for name, reason in VocabularyEnds.absent.items()}
)
IGNORED: Mapping[str, Ignored] = MappingProxyType(
    {
        "t2d": Ignored("d2t says the same, and drafting needs no mask over the vocabulary"),
        "verifier_lm_head.weight": Ignored("the target's head, for training"),
        "verifier_norm.weight": Ignored("the target's final norm, for training"),
    }
)


def common_name(name: str) -> str | Ignored | None:
    """The place of a tensor in a head, for names that all forms share."""
    if name in IGNORED:
        return IGNORED[name]
    if name.endswith("rotary_emb.inv_freq"):
        return Ignored("the frequencies follow from the config")
    return f"ends.{name}" if name in ENDS else name


def settle_attention_biases(
    shape: DecoderShape, stated: bool | None, names: Set[str], where: str
) -> DecoderShape:
    """The shape with the biases that the file has.

    Readers differ about the output projection's, so the file decides there. For queries, keys and
    values it must agree with the config.

    Args:
        shape: of the decoder.
        stated: what the config says; None where it does not say.
        names: of the file's tensors.
        where: of the config.

    Raises:
        CheckpointError: the config and the file contradict each other.
    """
    has_bias = any(name.endswith("self_attn.q_proj.bias") for name in names)
    if stated is not None and stated != has_bias:
        raise CheckpointError(
            "an EAGLE head's config and weights contradict each other",
            where=f"{where}, key 'attention_bias'",
            got=f"{stated}, and the file has {'a' if has_bias else 'no'} self_attn.q_proj.bias; "
            f"allowed: {has_bias}",
            fix="use the config.json that belongs to the weights",
        )
    return replace(
        shape,
        attention_bias=has_bias,
        attention_output_bias=any(name.endswith("self_attn.o_proj.bias") for name in names),
    )
