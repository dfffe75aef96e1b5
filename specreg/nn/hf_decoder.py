"""Any Hugging Face decoder as packed rows over a `KVView`: target, or draft model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from specreg.capabilities import KVLayerSpec
from specreg.checkpoint import Checkpoint
from specreg.errors import CheckpointError, MissingDependencyError, TargetError
from specreg.nn.hf_attention import DecoderStep, register_attention
from specreg.nn.hf_probe import probe
from specreg.nn.hf_structure import DecoderStructure
from specreg.nn.residual_taps import ResidualTaps
from specreg.speculator import KVRows, KVView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DecoderOutput", "HFDecoder", "warn_of_unread"]

logger = logging.getLogger(__name__)


class DecoderOutput(NamedTuple):
    """States of the packed tokens after one forward.

    Attributes:
        hidden: `[num_tokens, hidden_size]` after the final norm: what the head reads.
        pre_norm: the residual stream before the final norm; None if not asked for.
        aux: entry id -> residual stream entering that layer, in ascending order of ids; entry
            `num_layers` is the stream before the final norm.
    """

    hidden: Tensor
    pre_norm: Tensor | None
    aux: dict[int, Tensor]


class HFDecoder:
    """A causal language model of `transformers` whose attention goes through a `KVView`.

    Attributes:
        config: `config.json` as the model understands it, defaults filled in.
        vocab_size, hidden_size, num_layers: sizes; head rows beyond `vocab_size` are dropped.
        dtype, device: of the weights.
        kv_specs: one a layer, in order: what the `KVView` given to `forward` must hold.
        generation_config: the checkpoint's generation settings; None when it has none.
        max_model_len: longest request whose positions the model can encode; None when unlimited.
        head: the language-model head over the whole vocabulary.
        is_head_tied: whether `head` is the embedding's own memory.
        unread_tensors: of the checkpoint, that the model has no place for.
    """

    unread_tensors: tuple[str, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over a loaded model: refuse what cannot be right, then prove that the rest is.

        Raises:
            TargetError: see `specreg.nn.hf_probe`.
        """
        register_attention()
        structure = DecoderStructure.of(model)
        findings = probe(model, structure)
        self.config: Mapping[str, Any] = model.config.to_dict()
        generation: Any = model.generation_config
        self.generation_config: Mapping[str, Any] | None = generation and generation.to_dict()
        self.head = findings.head
        self.kv_specs: tuple[KVLayerSpec, ...] = findings.kv_specs
        self.vocab_size = self.head.num_rows
        self.hidden_size = self.head.weight.shape[1]
        self.num_layers = len(structure.layers)
        self.dtype, self.device = self.head.weight.dtype, self.head.weight.device
        self.max_model_len = structure.max_model_len
        self._decoder = structure.decoder
        self._layer_of = structure.layer_of
        self._embedding = model.get_input_embeddings()
        self.is_head_tied = any(
            parameter.data_ptr() == self.head.weight.data_ptr()
            for parameter in self._embedding.parameters()
        )
        norm = findings.final_norm
        self._has_taps = findings.has_flat_residual
        self._num_entries = self.num_layers + (norm is not None)
        self._taps = ResidualTaps([*structure.layers, *([norm] if norm is not None else [])])

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        warns: bool = True,
    ) -> HFDecoder:
        """Read a checkpoint directory; nothing is downloaded and no code of it is run.

        Args:
            path: directory with config.json and safetensors.
            dtype: of the weights, or its name; "auto" keeps the checkpoint's.
            device: where the weights go.
            warns: whether to log `unread_tensors`; a caller that does not knows who reads them.

        Raises:
            CheckpointError: files are missing or do not fill every parameter.
            TargetError: the model cannot run on paged keys and values.
            MissingDependencyError: `transformers` is not installed.
        """
        Checkpoint(path)  # refuses, with what to do, what would otherwise fail further in
        model, unread = _from_pretrained(os.fspath(path), dtype)
        model.requires_grad_(False)
        decoder = cls(cast(Any, model).to(device))
        decoder.unread_tensors = unread
        if warns:
            warn_of_unread(path, unread)
        return decoder

    def forward(
        self,
        input_ids: Tensor,
        rows: KVRows,
        kv: KVView,
        *,
        aux_layer_ids: Iterable[int] = (),
        pre_norm: bool = False,
    ) -> DecoderOutput:
        """Run packed tokens of any number of requests; their keys and values are written to `kv`.

        No host synchronisation on a GPU. States share memory with nothing that outlives the call.

        Args:
            input_ids: int64 `[num_tokens]`; anything on padding rows.
            rows: addresses of the tokens; `positions` are what the model's position encoding sees.
            kv: holds `kv_specs`.
            aux_layer_ids: entry ids of the residual stream to return.
            pre_norm: whether to return the stream before the final norm.

        Raises:
            TargetError: an entry that this model does not have.
        """
        entries = set(aux_layer_ids)
        if pre_norm:
            entries.add(self.num_layers)
        if entries:
            self._check_entries(entries)
        self._taps.arm(entries)
        is_live = rows.slots >= 0
        with DecoderStep(rows, kv, self._layer_of).running():
            output = self._decoder(
                input_ids=torch.where(is_live, input_ids, 0)[None],
                position_ids=torch.where(is_live, rows.positions, 0)[None],
                use_cache=False,
            )
        states = {entry: state[0] for entry, state in self._taps.take().items()}
        return DecoderOutput(
            hidden=output.last_hidden_state[0],
            pre_norm=states[self.num_layers] if pre_norm else None,
            aux={entry: states[entry] for entry in sorted(set(aux_layer_ids))},
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings `[n, hidden_size]` of `token_ids [n]`, as the embedding module gives."""
        return cast(Tensor, self._embedding(token_ids))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[n, vocab_size]` of `hidden [n, hidden_size]`, in the weights' dtype."""
        return self.head(hidden)

    def keep_head_rows(self, start: int, end: int) -> None:
        """Cut the head to vocabulary entries `start .. end-1`: `compute_logits` gives only those.

        Frees the other rows, unless the head is the embedding's memory.
        """
        head = self.head.rows(start, end)
        self.head = head if self.is_head_tied else head.clone()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, a tied head counted once."""
        own = [] if self.is_head_tied else [self.head.weight]
        bias = [] if self.head.bias is None else [self.head.bias]
        return sum(p.nbytes for p in (*self._decoder.parameters(), *own, *bias))

    def _check_entries(self, entries: set[int]) -> None:
        if self._has_taps and entries <= set(range(self._num_entries)):
            return
        allowed = f"0..{self._num_entries - 1}" if self._has_taps else "none"
        raise TargetError(
            "the target has no residual stream at an entry that was asked for",
            where=f"{type(self._decoder).__name__}, entries {sorted(entries)}",
            got=f"{self.num_layers} layers; allowed: {allowed}",
            fix="use a drafter that was trained for this target, or correct its layer ids",
        )


def warn_of_unread(path: str | os.PathLike[str], names: Iterable[str]) -> None:
    """Log the names of tensors that nothing reads, if there are any."""
    if told := ", ".join(names):
        logger.warning("%s: tensors that nothing reads: %s", path, told)


def _from_pretrained(
    path: str, dtype: torch.dtype | str
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model, and the tensors that it has no place for."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingDependencyError(
            "Hugging Face models cannot be loaded",
            where="transformers",
            got=f"{error}; allowed: transformers >= 5.0",
            fix="pip install 'specreg[runtime]'",
        ) from error
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        if getattr(config, "is_encoder_decoder", False):
            raise TargetError(
                "an encoder-decoder model is not a target",
                where=f"{path}, model_type {config.model_type!r}",
                got="decoder layers with cross-attention; allowed: decoders only",
                fix="use a decoder-only language model",
            )
        with _without_load_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
                **options,
            )
    except ImportError as error:
        raise MissingDependencyError(
            "the checkpoint's format needs a package that is not installed",
            where=path,
            got=str(error).strip().splitlines()[0],
            fix="install the package it names",
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            "the checkpoint cannot be loaded as a causal language model",
            where=path,
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}; allowed: a "
            "directory with the config.json and the safetensors of a model that transformers knows",
            fix="check the path; convert pickled weights (.bin, .pt) to safetensors",
        ) from error
    model, report = loaded
    _check_report(path, report)
    return cast("PreTrainedModel", model), tuple(sorted(report["unexpected_keys"]))


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep back the table of tensors that transformers logs: what is in it is told or refused."""
    reporter = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporter.addFilter(keep)
    try:
        yield
    finally:
        reporter.removeFilter(keep)


def _check_report(path: str, report: Mapping[str, Any]) -> None:
    """Refuse a parameter that the checkpoint did not fill: it would be random."""
    unfilled = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if unfilled:
        raise CheckpointError(
            "the checkpoint does not fill every parameter of the model",
            where=path,
            got=f"{len(unfilled)} parameters without a value: {', '.join(unfilled[:5])}",
            fix="use a complete checkpoint whose config.json belongs to it",
        )
