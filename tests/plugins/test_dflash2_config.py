"""What configs of DFlash2 and LiLiCorr declare, and what of them is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from golden_cases import FOLDER
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.dflash2.config import read_dflash2
from specreg_dflash.lilicorr.config import read_lilicorr

from specreg.capabilities import CacheDtype, DraftingStyle, DraftLogitsLayout
from specreg.cli import main
from specreg.config import EngineConfig, SpeculativeConfig
from specreg.errors import CheckpointError, ConfigError
from specreg.policy import resolve
from specreg.registry import get_registry
from specreg.specs import DraftSetup

Config = dict[str, Any]
DENSE, _, TOP_K = DraftLogitsLayout
GIB = 2**30


def config_of(case: str, form: str = "checkpoint_hf") -> Config:
    config: Config = json.loads((FOLDER / case / form / "config.json").read_text())
    return config


def spec_of(config: Mapping[str, Any], method: str | None = "dflash") -> Any:
    keys = {"num_speculative_tokens": 2, "model": "somewhere", "method": method}
    return get_registry().select(SpeculativeConfig.parse(keys), config, {}).spec


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("DFlashDraftModel", "dflash"),
        ("DFlash2DraftModel", "dflash2"),
        ("DFlash2BeamDraftModel", "dflash2"),
        ("LiLiCorrDraftModel", "lilicorr"),
        ("Qwen3XPressModel", "xpress"),
    ],
)
def test_the_architecture_decides_which_drafter_the_method_dflash_means(
    architecture: str, name: str
) -> None:
    case = {"dflash": "dflash-1", "dflash2": "dflash2-2", "lilicorr": "lilicorr-1"}
    config = config_of(case.get(name, "dflash-1")) | {"architectures": [architecture]}
    if "Beam" in architecture:
        config["layer_types"] = ["sliding_attention"] * 2
    assert spec_of(config).name == name
    assert spec_of(config, None).name == name
    if name in ("dflash2", "lilicorr"):
        assert spec_of(config, name).name == name


def test_the_type_of_the_speculators_form_decides_too() -> None:
    assert spec_of(config_of("dflash2-1", "checkpoint")).name == "dflash2"
    assert spec_of(config_of("dflash-1", "checkpoint")).name == "dflash"


@pytest.mark.parametrize(
    ("case", "form", "num_candidates", "max_drafts"),
    [
        ("dflash2-1", "checkpoint", 4, 4),
        ("dflash2-1", "checkpoint_hf", 4, 4),
        ("dflash2-2", "checkpoint_hf", 8, 5),
        ("lilicorr-1", "checkpoint_hf", 4, 5),
    ],
)
def test_candidates_and_drafts_come_from_the_config(
    case: str, form: str, num_candidates: int, max_drafts: int
) -> None:
    config = config_of(case, form)
    spec = spec_of(config)
    declared = spec.capabilities_for(DraftSetup(draft_config=config))
    assert declared.num_candidates == num_candidates
    assert declared.max_num_speculative_tokens == max_drafts
    assert spec.default_num_speculative_tokens(config) == max_drafts
    assert declared.layouts == {TOP_K, DENSE}
    assert declared.cache_dtype is CacheDtype.FLOAT32
    assert declared.style is DraftingStyle.SEMI_AUTOREGRESSIVE
    assert declared.supports_probabilistic
    assert declared.honors_owner_mask
    assert declared.is_cuda_graph_safe
    assert not declared.supports_watermarker
    empty = spec.capabilities_for(DraftSetup())
    assert (empty.num_candidates, empty.layouts) == (None, {TOP_K, DENSE})


def test_more_drafts_than_the_block_has_rows_for_are_refused() -> None:
    keys = {"method": "dflash", "model": "somewhere", "num_speculative_tokens": 6}
    with pytest.raises(ConfigError, match=r"got:   6; allowed: 1 to 5"):
        get_registry().select(SpeculativeConfig.parse(keys), config_of("lilicorr-1"), {})


BIG = {"vocab_size": 248_320, "block_size": 8}


def big_config(case: str, folder: Path) -> str:
    """A config of the size that the figures are of: 16 candidates, K 7."""
    config = config_of(case) | BIG
    key = "selector_top_k" if case.startswith("dflash2") else "lilicorr_candidate_topk"
    config["dflash_config"] |= {key: 16, "block_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("case", ["dflash2-1", "lilicorr-1"])
def test_the_plan_shows_both_layouts_and_takes_the_one_without_gigabytes(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speculative = {
        "method": "dflash",
        "model": big_config(case, tmp_path),
        "draft_sample_method": "probabilistic",
    }
    run = {
        "speculative": speculative,
        "tensor_parallel_size": 4,
        "max_num_seqs": 256,
        "enable_batch_sharded_sampling": True,
        "vocab_size": BIG["vocab_size"],
        "dtype": "bfloat16",
    }
    plan = resolve(EngineConfig.parse(run))
    assert (plan.layout, plan.dtype, plan.num_shards) == (TOP_K, "float32", 4)
    assert plan.shape == (64, 7, 16)
    sizes = plan.possible_layouts
    assert set(sizes) == {TOP_K, DENSE}
    assert sizes[DENSE].logits_bytes == 64 * 7 * 248_320 * 4
    assert f"{sizes[DENSE].logits_bytes / GIB:.2f}" == "0.41"
    assert plan.bytes_per_rank + plan.side_bytes_per_rank < 2**20
    dense = resolve(EngineConfig.parse(run | {"draft_logits_layout": "dense"}))
    assert (dense.layout, dense.shape) == (DENSE, (64, 7, 248_320))
    assert dense.replicated_bytes_per_rank == 4 * dense.bytes_per_rank

    arguments = ["plan", "--speculative-config", json.dumps(speculative), "-tp", "4"]
    arguments += ["--max-num-seqs", "256", "--vocab-size", "248320", "--dtype", "bfloat16"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--enable-batch-sharded-sampling"])
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "layout top_k, float32 [64, 7, 16]: 28672 bytes a rank" in printed
    assert "also possible: layout dense, 0.41 GiB a rank" in printed


def test_keys_that_the_speculators_form_lacks_have_its_librarys_defaults() -> None:
    config = config_of("dflash2-1", "checkpoint")
    config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
    }
    for key in ("block_size", "sliding_window_non_causal", "conv_kernel_size", "conv_group_size"):
        del config[key]
    for key in ("selector_rank", "selector_top_k"):
        del config[key]
    read = read_dflash2(ConfigForm.of(config))
    assert read.backbone.block_size == 8
    assert read.backbone.is_causal == (False, False)
    assert read.convolution == (2, 16)
    assert (read.rank, read.num_candidates) == (256, 16)
    assert (read.output_multiplier, read.soft_cap) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("case", "key", "value", "attribute"),
    [
        ("dflash2-2", "conv_kernel_size", 4, "convolution"),
        ("dflash2-2", "conv_group_size", 16, "convolution"),
        ("dflash2-2", "selector_rank", 5, "rank"),
        ("dflash2-2", "selector_top_k", 5, "num_candidates"),
        ("dflash2-2", "output_multiplier", 0.5, "output_multiplier"),
        ("dflash2-2", "final_logit_softcapping", 3.0, "soft_cap"),
        ("dflash2-2", "input_embedding_scale", 2.5, "backbone"),
        ("lilicorr-1", "input_embedding_scale", 2.5, "backbone"),
        ("lilicorr-1", "conv_kernel_size", 3, "convolution"),
        ("lilicorr-1", "conv_group_size", 8, "convolution"),
        ("lilicorr-1", "lilicorr_hidden_size", 16, "lattice"),
        ("lilicorr-1", "lilicorr_candidate_topk", 8, "num_candidates"),
        ("lilicorr-1", "lilicorr_num_heads", 4, "lattice"),
        ("lilicorr-1", "lilicorr_mlp_ratio", 3.5, "lattice"),
        ("lilicorr-1", "lilicorr_num_layers", 1, "lattice"),
        ("lilicorr-1", "lilicorr_factor_dim", 4, "lattice"),
        ("lilicorr-1", "lilicorr_vector_eps", 1e-3, "lattice"),
        ("lilicorr-1", "lilicorr_logit_scale", 2.0, "lattice"),
    ],
)
def test_every_key_of_the_candidates_changes_what_is_read(
    case: str, key: str, value: float, attribute: str
) -> None:
    read: Callable[[ConfigForm], Any] = read_dflash2 if "dflash2" in case else read_lilicorr
    config = config_of(case)
    before = read(ConfigForm.of(config))
    changed = copy.deepcopy(config)
    changed["dflash_config"][key] = value
    form = ConfigForm.of(changed)
    after = read(form)
    assert form.top.unread() == []
    assert getattr(after, attribute) != getattr(before, attribute)
    fields = vars(before).keys() - {attribute}
    assert all(getattr(after, field) == getattr(before, field) for field in fields)


def test_a_width_of_0_is_the_backbones_and_no_convolutions_are_none() -> None:
    config = config_of("lilicorr-1")
    for empty in (0, None):
        keys = ("lilicorr_hidden_size", "conv_kernel_size", "conv_group_size")
        config["dflash_config"] |= dict.fromkeys(keys, empty)
        read = read_lilicorr(ConfigForm.of(config))
        assert read.lattice.hidden_size == 64
        assert read.convolution is None


BEAM = {
    "architectures": ["DFlash2BeamDraftModel"],
    "layer_types": ["sliding_attention"] * 2,
}


def test_the_beam_kind_ignores_multiplier_and_embedding_scale() -> None:
    form = ConfigForm.of(config_of("dflash2-2") | BEAM)
    read = read_dflash2(form)
    assert read.is_beam
    assert (read.output_multiplier, read.backbone.embedding_scale) == (1.0, 1.0)
    assert read.soft_cap == 6.0
    assert form.top.unread() == ["dflash_config.output_multiplier"]


def section(**keys: Any) -> Config:
    return {"dflash_config": keys}


ABSENT = object()
REFUSED = [
    ("dflash2-2", section(selector_top_k=129), "selector_top_k.*129; allowed: 1 to 128"),
    ("dflash2-2", {"vocab_size": 7, **section(mask_token_id=0)}, "top_k.*8; allowed: 1 to 7"),
    ("dflash2-2", section(selector_top_k=0), "selector_top_k.*at least 1"),
    ("dflash2-2", section(selector_rank=ABSENT), "lacks 'selector_rank'"),
    ("dflash2-2", section(selector_top_k=ABSENT), "lacks 'selector_top_k'"),
    ("dflash2-2", section(conv_kernel_size=ABSENT), "lacks 'conv_kernel_size'"),
    ("dflash2-2", section(conv_group_size=7), "3 and 7; allowed.*divide the hidden size 64"),
    ("dflash2-2", section(output_multiplier=0.0), "output_multiplier.*0.0; allowed: above 0"),
    ("dflash2-2", section(final_logit_softcapping=-1.0), "softcapping.*-1.0; allowed: 0 for none"),
    ("dflash2-2", section(sample_from_anchor=True), "does not sample from the anchor's row"),
    ("dflash2-2", {"draft_vocab_size": 100}, "whole vocabulary.*100; allowed: the vocab_size 160"),
    ("dflash2-2", BEAM | {"is_causal": True}, "Beam kind.*got:   causal layers; allowed"),
    ("dflash2-2", BEAM | {"layer_types": ["full_attention"] * 2}, "layers that see the whole"),
    ("dflash2-2", BEAM | {"attention_bias": True}, "biases in attention"),
    ("dflash2-2", BEAM | section(final_logit_softcapping=0.0), "no final_logit_softcapping"),
    ("lilicorr-1", section(lilicorr_candidate_topk=6), "topk.*6; allowed: a power of two"),
    ("lilicorr-1", section(lilicorr_candidate_topk=32), "topk.*32; allowed.*at most 16"),
    ("lilicorr-1", section(lilicorr_num_heads=5), "num_heads.*5; allowed: a divisor.*32"),
    ("lilicorr-1", section(lilicorr_mlp_ratio=0.0), "mlp_ratio.*allowed: above 0"),
    ("lilicorr-1", section(lilicorr_vector_eps=0.0), "vector_eps.*0.0; allowed: above 0"),
    ("lilicorr-1", section(lilicorr_logit_scale=-1.0), "logit_scale.*-1.0; allowed: above 0"),
    ("lilicorr-1", section(lilicorr_enabled=False), "lilicorr_enabled.*false; allowed: true"),
    ("lilicorr-1", section(lilicorr_factor_dim=ABSENT), "lacks 'lilicorr_factor_dim'"),
    ("lilicorr-1", section(conv_group_size=0), "2 and 0; allowed: both above 0"),
    ("lilicorr-1", {"block_size": ABSENT, **section(block_size=ABSENT)}, "lacks 'block_size'"),
    ("lilicorr-1", {"draft_vocab_size": 100}, "whole vocabulary.*100"),
]


def merge(config: Config, changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping):
            merge(config[key], value)
        elif value is ABSENT:
            del config[key]
        else:
            config[key] = value


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_a_config_that_contradicts_itself_is_refused_before_any_weight_is_read(
    case: str, changes: Config, message: str
) -> None:
    config = config_of(case)
    merge(config, changes)
    spec = spec_of(config_of(case))
    with pytest.raises(CheckpointError, match=re.compile(message, re.DOTALL)):
        spec.capabilities_for(DraftSetup(draft_config=config))
