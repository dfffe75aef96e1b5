"""Reading the configs of DSpark drafters in both forms, and what they declare."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dspark_cases import config_of, load
from golden_cases import GoldenCase
from specreg_dflash.config_form import ConfigForm
from specreg_dspark.dspark_config import DSparkConfig, read_dspark
from specreg_dspark.recognition import is_dspark

from specreg.capabilities import CacheDtype, DraftLogitsLayout
from specreg.config import SpeculativeConfig
from specreg.errors import CheckpointError, ConfigError, UnknownMethodError
from specreg.registry import get_registry
from specreg.specs import DraftSetup

DENSE_FORM, SPECULATORS = "checkpoint_dense", "checkpoint"
DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout


def read(config: dict[str, Any]) -> DSparkConfig:
    return read_dspark(ConfigForm.of(config))


def dense(**top: Any) -> dict[str, Any]:
    return config_of("dspark-1", DENSE_FORM) | top


def library(decoder: dict[str, Any] | None = None, /, **top: Any) -> dict[str, Any]:
    config = config_of("dspark-2", SPECULATORS) | top
    config["transformer_layer_config"] |= decoder or {}
    return config


@pytest.mark.parametrize("case", ["dspark-1", "dspark-2"])
def test_both_forms_say_the_same(case: str) -> None:
    both = [read(config_of(case, form)) for form in (DENSE_FORM, SPECULATORS)]
    facts = [{**vars(c), "backbone": {**vars(c.backbone), "num_target_layers": 0}} for c in both]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("config", [dense(), library()], ids=["dense", "speculators"])
def test_a_config_that_does_not_say_where_drafts_start_starts_at_the_anchor(
    config: dict[str, Any],
) -> None:
    assert read(config | {"sample_from_anchor": None}).is_anchor_first
    assert not read(config | {"sample_from_anchor": False}).is_anchor_first


def test_what_other_readers_take_otherwise_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM takes false for the form of `speculators`, the library itself true."""
    said = "sample_from_anchor is absent: true is taken"
    load("dspark-1", tmp_path / "as it is", form=SPECULATORS)
    load("dspark-1", tmp_path / "dense", lambda t, c: c.pop("sample_from_anchor"))
    assert said not in caplog.text
    load("dspark-1", tmp_path, lambda t, c: c.pop("sample_from_anchor"), SPECULATORS)
    assert caplog.text.count(said) == 1


def test_what_absent_keys_come_to_is_what_the_writer_of_the_form_takes() -> None:
    heads = dict.fromkeys(
        ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    )
    of_library = read(library(block_size=None, **heads))
    assert (of_library.markov_rank, of_library.backbone.block_size) == (256, 8)
    assert of_library.has_confidence_head
    assert of_library.confidence_reads_markov
    of_dense = read(dense(**heads | {"markov_rank": 4}))
    assert not of_dense.has_confidence_head
    assert not of_dense.confidence_reads_markov
    assert of_library.markov_head == of_dense.markov_head == "vanilla"
    renamed = read(dense(block_size=None, dspark_block_size=6))
    assert renamed.backbone.block_size == 6


def test_layers_are_counted_as_each_key_counts_them() -> None:
    ids = {"target_layer_ids": None}
    assert read(dense()).backbone.aux_layer_ids == (2, 4)
    entries = dense(**ids, eagle_aux_hidden_state_layer_ids=[2, 5])
    assert read(entries).backbone.aux_layer_ids == (2, 5)
    of_library = library(aux_hidden_state_layer_ids=[1, 3])
    assert read(of_library).backbone.aux_layer_ids == (1, 3)
    both = dense(eagle_aux_hidden_state_layer_ids=[1, 3])
    with pytest.raises(CheckpointError, match="does not tell which states"):
        read(both)


def test_the_noise_token_is_looked_for_in_order() -> None:
    keys = {
        "dflash_config": {"mask_token_id": 1},
        "mask_token_id": 2,
        "dspark_noise_token_id": 3,
        "pard_token": 4,
        "ptd_token_id": 5,
    }
    for expected, key in enumerate(list(keys), start=1):
        assert read(dense(**keys)).backbone.mask_token_id == expected
        keys[key] = None
    with pytest.raises(CheckpointError, match="lacks 'mask_token_id'"):
        read(dense(**keys))


ROUND_TRIP: list[tuple[str, Any, str]] = [
    ("sample_from_anchor", False, "is_anchor_first"),
    ("markov_rank", 3, "markov_rank"),
    ("markov_head_type", "gated", "markov_head"),
    ("enable_confidence_head", False, "has_confidence_head"),
    ("confidence_head_with_markov", False, "confidence_reads_markov"),
    ("final_logit_softcapping", 3.0, "soft_cap"),
    ("logit_scale", 0.5, "logit_scale"),
    ("block_size", 9, "block_size"),
    ("draft_vocab_size", 7, "draft_vocab_size"),
    ("vocab_size", 170, "vocab_size"),
    ("mask_token_id", 3, "mask_token_id"),
    ("target_layer_ids", [0, 1], "aux_layer_ids"),
    ("use_aux_hidden_state", False, "aux_layer_ids"),
    ("target_hidden_size", 32, "target_hidden_size"),
    ("num_target_layers", 9, "num_target_layers"),
    ("is_causal", True, "is_causal"),
    ("num_hidden_layers", 1, "shape"),
    ("hidden_size", 32, "shape"),
    ("rms_norm_eps", 1e-3, "shape"),
    ("attention_bias", True, "shape"),
    ("rope_parameters", {"rope_theta": 5.0}, "shape"),
]


def facts(config: dict[str, Any]) -> dict[str, Any]:
    drafter = read(config)
    return {**vars(drafter.backbone), **vars(drafter)}


@pytest.mark.parametrize(("key", "value", "attribute"), ROUND_TRIP, ids=[k for k, *_ in ROUND_TRIP])
def test_every_key_reaches_the_drafter(key: str, value: Any, attribute: str) -> None:
    config = dense()
    assert facts(config)[attribute] != facts(config | {key: value})[attribute]


def test_a_soft_cap_beside_the_decoder_layers_is_read() -> None:
    assert read(library({"final_logit_softcapping": 7.0})).soft_cap == 7.0
    assert read(library(final_logit_softcapping=5.0)).soft_cap == 5.0
    assert read(dense(final_logit_softcapping=0)).soft_cap is None


@pytest.mark.parametrize("form", [DENSE_FORM, SPECULATORS])
@pytest.mark.parametrize("case", ["dspark-1", "dspark-2"])
def test_every_key_is_read_and_a_strange_one_is_told(
    case: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(case, tmp_path / "plain", form=form)
    assert "nothing reads" not in caplog.text
    load(case, tmp_path / "strange", lambda t, c: c.update(markov_it=1), form)
    assert "keys that nothing reads: markov_it" in caplog.text


WRONG: list[tuple[dict[str, Any], str]] = [
    (dense(markov_rank=None), "lacks 'markov_rank'"),
    (dense(markov_rank=0), "has a wrong 'markov_rank'"),
    (dense(block_size=None), "lacks 'block_size'"),
    (dense(markov_head_type="lstm"), r"(?s)of a kind that is not known here.*gated, rnn, vanilla"),
    (dense(sample_from_anchor="yes"), "has a wrong 'sample_from_anchor'"),
    (dense(sample_from_anchor=False, block_size=1), "has no row for a draft"),
    (dense(final_logit_softcapping=-1.0), "soft cap"),
    (dense(eagle_config={"use_aux_hidden_state": False}), "says twice"),
    (dense(is_neox_style=False), "rotates its heads in a layout that is not known"),
    (dense(architectures=["DSparkV41DraftModel"]), "(?s)not implemented.*DSparkV41DraftModel"),
    (dense(architectures=["DSparkDraftModel"]), "(?s)not implemented.*DSparkDraftModel"),
    (dense(kv_lora_rank=512), "(?s)Qwen3DSparkModel with kv_lora_rank"),
    (library({"num_experts": 8}), "(?s)DSparkDraftModel with num_experts"),
    (
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "dspark_block_size": 5,
            "n_routed_experts": 256,
        },
        "(?s)layers that are not implemented.*DeepseekV4ForCausalLM with n_routed_experts",
    ),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(copy.deepcopy(config))
    assert is_dspark(config)
    caught.match(message)
    with pytest.raises(CheckpointError, match=message):
        select(config, method="dspark")


def select(config: dict[str, Any], **keys: Any) -> Any:
    return get_registry().select(SpeculativeConfig.parse({"model": "x", **keys}), config, {})


@pytest.mark.parametrize(
    ("case", "form", "most"),
    [
        ("dspark-1", SPECULATORS, 4),
        ("dspark-1", DENSE_FORM, 4),
        ("dspark-2", SPECULATORS, 4),
        ("dspark-2", DENSE_FORM, 4),
        ("dspark-3", SPECULATORS, 5),
    ],
)
@pytest.mark.parametrize("keys", [{}, {"method": "dspark"}])
def test_a_checkpoint_selects_the_drafter_and_fills_its_block(
    case: str, form: str, most: int, keys: dict[str, Any]
) -> None:
    config = config_of(case, form)
    selection = select(config, **keys)
    assert (selection.spec.name, selection.speculative.method) == ("dspark", "dspark")
    assert selection.speculative.num_speculative_tokens == most
    with pytest.raises(ConfigError, match=f"allowed: 1 to {most}"):
        select(config, num_speculative_tokens=most + 1, **keys)


def test_a_checkpoint_of_another_method_is_not_served() -> None:
    with pytest.raises(UnknownMethodError, match="for this draft checkpoint"):
        select(dense(architectures=["LlamaForCausalLM"]), method="dspark")


def test_what_is_declared_follows_config_and_options() -> None:
    config = config_of("dspark-2", DENSE_FORM)
    reduced, few, many = (
        select(config, **keys).capabilities
        for keys in ({}, {"dspark_draft_topk": 5}, {"dspark_draft_topk": 96})
    )
    assert reduced.layouts == {DENSE, DRAFT_VOCAB}
    assert (reduced.draft_vocab_size, reduced.num_candidates) == (96, None)
    assert reduced.supports_watermarker
    for named in ({"fused_sampler": "markov_sample"}, {"fused_sampling": "require"}):
        assert not select(config, **named).capabilities.supports_watermarker
    for candidates, k in ((few, 5), (many, 96)):
        assert candidates.layouts == {DENSE, TOP_K}
        assert (candidates.draft_vocab_size, candidates.num_candidates) == (None, k)
        assert candidates.cache_dtype is CacheDtype.FLOAT32
        assert not candidates.supports_watermarker
    rows = select(dense(), dspark_draft_topk=129).capabilities
    assert (rows.layouts, rows.num_candidates) == ({DENSE}, None)
    needs = select(dense()).spec.needs_for(DraftSetup(dense()))
    assert (needs.aux_layer_ids, len(needs.kv_specs), needs.prefill_lookahead) == ((2, 4), 2, 0)


def test_more_candidates_than_the_head_has_columns_are_refused() -> None:
    config = config_of("dspark-2", SPECULATORS)
    with pytest.raises(ConfigError, match="choose among so many") as caught:
        select(config, dspark_draft_topk=97)
    assert "dspark_draft_topk" in caught.value.where
    assert "97; allowed: 1 to 96" in caught.value.got
    with pytest.raises(ConfigError, match="dspark_draft_topk"):
        select(config, dspark_draft_topk=0)


@pytest.mark.parametrize("form", [DENSE_FORM, SPECULATORS])
def test_planning_brings_no_framework(form: str) -> None:
    source = f"""
import sys
from specreg.config import EngineConfig
from specreg.policy import resolve
model = {str(GoldenCase("dspark-2").folder / form)!r}
plan = resolve(EngineConfig.parse({{
    "speculative": {{"model": model, "dspark_draft_topk": 3}},
    "vocab_size": 160, "dtype": "bfloat16",
}}))
print(plan.num_speculative_tokens)
print([name for name in ("torch", "transformers", "safetensors") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["4", "[]"]
