"""What a config tells about a checkpoint's MTP modules, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from specreg.capabilities import HiddenStates, KVLayerSpec
from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg.model_config import text_config_of
from specreg.nn.shape import DecoderShape
from specreg_mtp.conventions import CONVENTIONS, Family, families_of
from specreg_mtp.layer_kinds import LAYER_KINDS
from specreg_mtp.layer_shapes import layer_shapes

__all__ = ["MTPSettings", "names_modules", "num_modules_of"]

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# A config without `model_type` under `transformer_layer_config` describes this one.
SPECULATORS_BASE = "qwen2"
# Of the target's other layers, or of what surrounds the decoder: a dense module acts on none.
OF_THE_TARGET = (
    "decoder_sparse_step",
    "first_k_dense_replace",
    "full_attention_interval",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_ssm_dtype",
    "max_window_layers",
    "mlp_only_layers",
    "moe_intermediate_size",
    "moe_layer_freq",
    "mtp_use_dedicated_embeddings",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "output_router_logits",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "scoring_func",
    "shared_expert_intermediate_size",
    "topk_group",
    "topk_method",
    "vocab_size",
)


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "mtp"


def _families(config: Mapping[str, Any]) -> tuple[Family, ...]:
    """What the modules may be written like, in the order of preference."""
    text = text_config_of(config)
    if _is_speculators(config):
        base = text.get("model_type") or SPECULATORS_BASE
        kind = LAYER_KINDS.get(str(base))
        if kind is None or not str(base).startswith("qwen"):
            raise CheckpointError(
                "MTP modules of this base model are not known",
                where="config.json, transformer_layer_config, model_type",
                got=f"{base!r}; allowed: {', '.join(b for b in LAYER_KINDS if b[:4] == 'qwen')}",
                fix="use a checkpoint that was trained for one of these",
            )
        return (Family(CONVENTIONS["speculators"], kind),)
    named = config.get("architectures")
    architectures = tuple(str(name) for name in named) if isinstance(named, list) else ()
    for part in (text, config):
        found = families_of(part.get("model_type"), architectures)
        if len(found) == 1:
            return found
    return families_of(text.get("model_type"), ())


def num_modules_of(config: Mapping[str, Any]) -> int | None:
    """Modules that a config declares; None where it has no key, or null. Never raises."""
    for part in (config, text_config_of(config)):
        for key in COUNT_KEYS:
            value = part.get(key)
            if type(value) is int and value >= 0:
                return value
    return None


def names_modules(config: Mapping[str, Any]) -> bool:
    """Whether a config is certainly one of a checkpoint with MTP modules. Never raises."""
    return _is_speculators(config) or bool(num_modules_of(config))


@dataclass(frozen=True)
class MTPSettings:
    """A config's facts.

    Attributes:
        config: the draft config.
        num_steps: K; None when unknown.
        where: of the config, for errors.
    """

    config: Mapping[str, Any]
    num_steps: int | None = None
    where: str = "config.json"

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """Candidates, of which tensor names tell the right one."""
        return _families(self.config)

    @property
    def hidden_states(self) -> HiddenStates:
        """The states of the target that the modules read."""
        return self.families[0].convention.hidden_states

    @cached_property
    def num_declared(self) -> int:
        """Modules that the config declares; 1 where it does not say.

        Raises:
            CheckpointError: a `speculators` checkpoint of several.
        """
        declared = num_modules_of(self.config) or 1
        if _is_speculators(self.config) and declared != 1:
            raise CheckpointError(
                "a speculators checkpoint of several MTP modules is not known",
                where=f"{self.where}, num_nextn_predict_layers",
                got=f"{declared}; allowed: 1",
                fix="use a checkpoint of one module",
            )
        return declared if any(f.convention.is_numbered for f in self.families) else 1

    @property
    def num_used(self) -> int:
        """Modules that run: one a step where there are several and K is above 1."""
        return min(self.num_declared, self.num_steps or 1)

    @cached_property
    def whole(self) -> ConfigReader:
        """Of the whole config."""
        whole = ConfigReader(self.config, self.where)
        whole.accept(*COUNT_KEYS)
        return whole

    @cached_property
    def decoder(self) -> ConfigReader:
        """Of the part that describes the decoder, in which a diff may leave out what is usual."""
        if _is_speculators(self.config):
            given = {k: v for k, v in text_config_of(self.config).items() if v is not None}
            filled = {**self.families[0].kind.defaults, **given}
            return ConfigReader(filled, f"{self.where}, transformer_layer_config")
        if isinstance(self.config.get("text_config"), Mapping):
            return self.whole.section("text_config")
        return self.whole

    def report(self) -> None:
        """Tell what nothing reads. Called once, when everything has been read."""
        self.decoder.accept(*COUNT_KEYS, *OF_THE_TARGET)
        if self.decoder is not self.whole:
            self.whole.accept("transformer_layer_config")
            if _is_speculators(self.config):
                self.decoder.report()
        self.whole.report()

    @cached_property
    def vocab_size(self) -> int | None:
        """Tokens of the vocabulary; None where it is not said. Raises `CheckpointError`."""
        vocab_size: int | None = self.decoder.integer("vocab_size", None)
        reduced = self.whole.integer("draft_vocab_size", None)
        if reduced is not None and reduced != vocab_size:
            raise CheckpointError(
                "MTP modules have no vocabulary of their own",
                where=f"{self.where}, draft_vocab_size",
                got=f"{reduced}; allowed: absent, or the target's {vocab_size}",
                fix="use a checkpoint that scores the target's whole vocabulary",
            )
        return vocab_size

    @property
    def num_target_layers(self) -> int:
        """Layers of the target: modules may be numbered on from them. Raises `CheckpointError`."""
        return self.decoder.integer("num_hidden_layers")

    def shapes(self, family: Family, num_modules: int) -> tuple[DecoderShape, ...]:
        """The decoder layer of each module; an `intermediate_size` that is absent is 0.

        Raises:
            CheckpointError: a size is missing or wrong, or a kind of layer is not offered.
        """
        shapes = layer_shapes(self.decoder, family, num_modules)
        windows = tuple(shape.sliding_windows[0] for shape in shapes)
        return tuple(replace(shape, sliding_windows=windows) for shape in shapes)

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """One a module that runs. A window keeps the rows that are read again behind it."""
        more = self.num_used - 1
        shapes = self.shapes(self.families[0], self.num_used)
        return tuple(
            KVLayerSpec(
                shape.num_kv_heads,
                shape.head_dim,
                sliding_window=None if window is None else window + more,
            )
            for shape, window in zip(shapes, shapes[0].sliding_windows, strict=True)
        )
