"""How families of models write and wire their MTP modules: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from specreg.capabilities import HiddenStates
from specreg_mtp.layer_kinds import LAYER_KINDS, PLAIN, LayerKind

__all__ = [
    "CONVENTIONS",
    "FAMILIES",
    "METHODS",
    "Convention",
    "Family",
    "families_of",
]


@dataclass(frozen=True)
class Convention:
    """Tensor names of a module, and what its parts are connected to.

    On a row, `z = projection(concat(embedding_norm(e), hidden_norm(u)))` and `y = layer(z)`, where
    e is the token's embedding and u the target's state or what the pass before feeds. The head
    reads `final_norm(y)`.

    Attributes:
        name: of the convention, for messages.
        names: part -> its name in the file, where `{i}` is the number of the module and `{n}` the
            same counted on from the target's layers; a part that is not here does not exist. Below
            `layer` lies an ordinary decoder layer.
        is_hidden_first: the concatenation is `[u; e]`; it is `[e; u]` otherwise.
        feeds_stream: the next pass reads y; it reads `final_norm(y)` otherwise.
        zeroes_first_embedding: e is zero on the row of position 0.
        hidden_states: which of the target's states is u.
        layer_names: name in the file -> our own, for parts of the layer with names of their own.
        ignored: names in the file that are not needed -> the reason.
        is_exclusive: the file holds nothing else, so that any other name is an error.
    """

    name: str
    names: Mapping[str, str]
    is_hidden_first: bool = False
    feeds_stream: bool = False
    zeroes_first_embedding: bool = False
    hidden_states: HiddenStates = HiddenStates.POST_NORM
    layer_names: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    is_exclusive: bool = False

    @property
    def is_numbered(self) -> bool:
        """Whether a file can hold several modules: each has a projection of its own."""
        return "{" in self.names["projection"]


def _numbered(prefix: str, **names: str) -> Mapping[str, str]:
    """Parts that lie under one prefix, the decoder layer directly."""
    return {"layer": prefix, **{part: f"{prefix}.{name}" for part, name in names.items()}}


_ENORM = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj"}
_TOKEN_NORM = {
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "projection": "input_proj",
    "final_norm": "final_layernorm",
}
_COPY = "the target embeds"
_DEEPSEEK_NAMES = _numbered(
    "model.layers.{n}", **_ENORM, final_norm="shared_head.norm", head="shared_head.head"
)
_DEEPSEEK_COPIES = {"model.layers.{n}.embed_tokens.weight": _COPY}
_VERIFIER = "a part of the verifier, left by training"

CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        convention.name: convention
        for convention in (
            Convention(
                "qwen",
                {
                    "embedding_norm": "mtp.pre_fc_norm_embedding",
                    "hidden_norm": "mtp.pre_fc_norm_hidden",
                    "projection": "mtp.fc",
                    "layer": "mtp.layers.{i}",
                    "final_norm": "mtp.norm",
                },
            ),
            Convention(
                "speculators",
                _numbered("mtp_layers.{i}", **_TOKEN_NORM),
                ignored={
                    "verifier_lm_head.weight": _VERIFIER,
                    "t2d": "the draft vocabulary is the target's",
                    "d2t": "the draft vocabulary is the target's",
                },
                is_exclusive=True,
            ),
            Convention(
                "mimo",
                _numbered("model.mtp_layers.{i}", **_TOKEN_NORM),
                is_hidden_first=True,
                zeroes_first_embedding=True,
                hidden_states=HiddenStates.PRE_NORM,
            ),
            Convention(
                "mimo_v2",
                _numbered("model.mtp.layers.{i}", **_ENORM, final_norm="final_layernorm"),
                layer_names={"pre_mlp_layernorm": "post_attention_layernorm"},
            ),
            Convention(
                "deepseek",
                _DEEPSEEK_NAMES,
                zeroes_first_embedding=True,
                ignored=_DEEPSEEK_COPIES,
            ),
            Convention(
                "glm",
                _DEEPSEEK_NAMES,
                feeds_stream=True,
                zeroes_first_embedding=True,
                ignored=_DEEPSEEK_COPIES,
            ),
            Convention(
                "ernie",
                {
                    "embedding_norm": "model.mtp_emb_norm.{i}",
                    "hidden_norm": "model.mtp_hidden_norm.{i}",
                    "projection": "model.mtp_linear_proj.{i}",
                    "layer": "model.mtp_block.{i}",
                },
                feeds_stream=True,
                zeroes_first_embedding=True,
            ),
            Convention(
                "step",
                _numbered(
                    "model.layers.{n}",
                    **_ENORM,
                    final_norm="shared_head.norm",
                    head="shared_head.output",
                ),
                feeds_stream=True,
                hidden_states=HiddenStates.PRE_NORM,
                ignored={
                    "model.layers.{n}.embed_tokens.weight": _COPY,
                    "model.layers.{n}.tok_embeddings.weight": _COPY,
                },
            ),
        )
    }
)


@dataclass(frozen=True)
class Family:
    """What models of some types have in common.

    Attributes:
        convention: of their modules.
        kind: of their decoder layers.
    """

    convention: Convention
    kind: LayerKind


def _family(convention: str, kind: str = "") -> Family:
    return Family(CONVENTIONS[convention], LAYER_KINDS.get(kind, PLAIN))


# By `model_type`, or by the first entry of `architectures` that is named here.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen3_next": _family("qwen", "qwen3_next"),
        "qwen3_5": _family("qwen", "qwen3_5"),
        "qwen3_5_text": _family("qwen", "qwen3_5_text"),
        "qwen3_5_moe": _family("qwen", "qwen3_5_moe"),
        "qwen3_5_moe_text": _family("qwen", "qwen3_5_moe_text"),
        "mimo": _family("mimo", "mimo"),
        "MiMoForCausalLM": _family("mimo", "mimo"),
        "mimo_v2": _family("mimo_v2", "glm4_moe"),
        "mimo_v2_flash": _family("mimo_v2", "glm4_moe"),
        "deepseek_v3": _family("deepseek"),
        "deepseek_v32": _family("deepseek"),
        "glm_moe_dsa": _family("deepseek"),
        "glm4_moe": _family("glm", "glm4_moe"),
        "glm4_moe_lite": _family("glm", "glm4_moe"),
        "glm_ocr": _family("glm", "glm4_moe"),
        "ernie4_5": _family("ernie"),
        "ernie4_5_moe": _family("ernie"),
        "step3p5": _family("step", "step3p5"),
        "step3p7": _family("step", "step3p5"),
    }
)

# Names of families that serving engines give, on top of the model types.
METHODS = (
    "mtp",
    "deepseek_mtp",
    "ernie_mtp",
    "glm4_moe_lite_mtp",
    "glm4_moe_mtp",
    "glm_ocr_mtp",
    "mimo_mtp",
    "mimo_v2_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
    "step3p5_mtp",
)

_SHORT = {"deepseek": "deepseek_v3", "ernie": "ernie4_5_moe"}

# A model type that no family names: whichever of these the tensors are called by.
_UNNAMED = ("qwen", "deepseek")


def families_of(model_type: object, architectures: tuple[str, ...]) -> tuple[Family, ...]:
    """The families that a config may belong to; several where only tensor names can tell.

    Those that are returned together read the same states of the target.
    """
    name = str(model_type or "").removesuffix("_mtp")
    for key in (*architectures, _SHORT.get(name, name)):
        if key in FAMILIES:
            return (FAMILIES[key],)
    kind = LAYER_KINDS.get(name, PLAIN)
    return tuple(Family(CONVENTIONS[convention], kind) for convention in _UNNAMED)
