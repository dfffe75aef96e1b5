"""MTP checkpoints that are faulty, or out of the ordinary: they load, or say what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from mtp_changes import (
    SPECULATORS,
    Change,
    Config,
    Weights,
    changed,
    logits_of,
    set_keys,
    set_tensor,
    without,
)
from mtp_families import FAMILIES
from mtp_harness import HIDDEN_SIZE, VOCAB_SIZE, Harness, MadeUpTarget

from specreg.errors import CheckpointError

HEAD, EMBEDDING = (VOCAB_SIZE, HIDDEN_SIZE), (VOCAB_SIZE, HIDDEN_SIZE)
FAULTY: dict[str, tuple[str, Change, str]] = {
    "the hidden size differs": (
        "glm",
        set_keys(hidden_size=16),
        r"not of this target(.|\n)*hidden_size 16; allowed: the target's 32",
    ),
    "the head has another height": (
        SPECULATORS,
        set_tensor("lm_head.weight", VOCAB_SIZE - 1, HIDDEN_SIZE),
        r"'lm_head.weight' \[16, 32\]; allowed: \[17, 32\]",
    ),
    "the vocabulary is larger than the target's": (
        "glm",
        set_keys(vocab_size=VOCAB_SIZE + 1),
        "larger vocabulary than the target",
    ),
    "the vocabulary is reduced": (
        "glm",
        set_keys(draft_vocab_size=9),
        "draft_vocab_size(.|\n)*allowed: absent, or the target's 17",
    ),
    "a smaller embedding": (
        "glm",
        lambda w, c: (
            set_keys(vocab_size=9)(w, c),
            set_tensor("model.embed_tokens.weight", 9, 32)(w, c),
        )[0],
        "cannot embed every token",
    ),
    "the head is quantised": (
        "glm",
        set_tensor("lm_head.weight_scale", VOCAB_SIZE),
        "quantised weights(.|\n)*'lm_head.weight_scale'",
    ),
    "a scale is left over": (
        "glm",
        set_tensor("model.layers.3.mlp.up_proj.weight_scale_inv", 1, 1),
        "quantised weights(.|\n)*model.layers.3.mlp.up_proj.weight_scale_inv",
    ),
    "a projection of bytes": (
        "a plain target",
        set_tensor("mtp.fc.weight", HIDDEN_SIZE, 2 * HIDDEN_SIZE, dtype=torch.int8),
        "'mtp.fc.weight'",
    ),
    "experts": (
        "qwen3_next",
        set_tensor("mtp.layers.0.mlp.experts.3.up_proj.weight", 4, HIDDEN_SIZE),
        r"a mixture of experts(.|\n)*'mtp.layers.0.mlp.experts.3.up_proj.weight' \[4, 32\]",
    ),
    "a router": (
        "deepseek",
        set_tensor("model.layers.2.mlp.gate.weight", 4, HIDDEN_SIZE),
        "a mixture of experts(.|\n)*'model.layers.2.mlp.gate.weight'",
    ),
    "fused experts": (
        SPECULATORS,
        set_tensor("mtp_layers.0.mlp.experts.gate_up_proj", 4, 8, HIDDEN_SIZE),
        "a mixture of experts(.|\n)*'mtp_layers.0.mlp.experts.gate_up_proj'",
    ),
    "latent attention": (
        "deepseek",
        set_tensor("model.layers.4.self_attn.kv_a_proj_with_mqa.weight", 4, HIDDEN_SIZE),
        "latent attention(.|\n)*'model.layers.4.self_attn.kv_a_proj_with_mqa.weight'",
    ),
    "a recurrent layer": (
        "a plain target",
        set_tensor("mtp.layers.0.linear_attn.in_proj.weight", 4, HIDDEN_SIZE),
        "a recurrent or convolution state(.|\n)*'mtp.layers.0.linear_attn.in_proj.weight'",
    ),
    "a bias that the config does not have": (
        "a plain target",
        set_tensor("mtp.layers.0.self_attn.q_proj.bias", HIDDEN_SIZE),
        "no place in the drafter(.|\n)*'mtp.layers.0.self_attn.q_proj.bias'",
    ),
    "a bias that the file does not have": (
        "a plain target",
        set_keys(attention_bias=True),
        r"without a tensor: mtp.layers.0.self_attn.k_proj.bias \[16\]",
    ),
    "a norm is missing": (
        "ernie",
        without("model.mtp_emb_norm.1.weight"),
        r"without a tensor: model.mtp_emb_norm.1.weight \[32\]",
    ),
    "a layer's norm with a name of its own is missing": (
        "mimo_v2",
        without("model.mtp.layers.0.pre_mlp_layernorm.weight"),
        "without a tensor: model.mtp.layers.0.pre_mlp_layernorm.weight",
    ),
    "a stray tensor among modules alone": (
        SPECULATORS,
        set_tensor("model.norm.weight", 2),
        "no place in the drafter(.|\n)*'model.norm.weight'",
    ),
    "a size is missing": (
        "glm",
        lambda w, c: c.pop("intermediate_size"),
        "lacks 'intermediate_size'",
    ),
    "two modules of the speculators library": (
        SPECULATORS,
        lambda w, c: c.update(num_nextn_predict_layers=2),
        "several MTP modules(.|\n)*2; allowed: 1",
    ),
    "an unknown base model": (
        SPECULATORS,
        set_keys(model_type="acme"),
        "'acme'; allowed: qwen2",
    ),
    "values of another width": (
        "mimo_v2",
        set_keys(v_head_dim=4),
        "v_head_dim(.|\n)*4; allowed: absent, or 8",
    ),
    "limits of a feed-forward": (
        "step",
        set_keys(swiglu_limits_shared=[0, 0, 7.0, 0, 0]),
        r"swiglu_limits_shared(.|\n)*7.0; allowed: 0 or null",
    ),
    "a layer without rotary": (
        "step",
        set_keys(use_rope_layers=[True, True, True, False, True]),
        "use_rope_layers",
    ),
    "another family's modules": (
        "mimo",
        lambda w, c: c.update(model_type="mimo_v2"),
        "holds no MTP modules(.|\n)*model.mtp.layers.0.eh_proj.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_checkpoint_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    name, change, message = FAULTY[fault]
    with pytest.raises(CheckpointError, match=message) as caught:
        Harness(changed(name, tmp_path, change))
    assert all((caught.value.what, caught.value.where, caught.value.got, caught.value.fix))


def test_without_ends_of_its_own_the_target_embeds_and_scores(tmp_path: Path) -> None:
    harness = Harness(changed(SPECULATORS, tmp_path))
    ends = harness.speculator.drafter.ends
    assert ends.shares_embedding
    assert ends.shares_head


@pytest.mark.parametrize("name", [SPECULATORS, "glm", "a plain target"])
def test_a_head_of_its_own_scores(name: str, tmp_path: Path) -> None:
    shared = logits_of(Harness(changed(name, tmp_path / "shared")))
    config = changed(name, tmp_path / "own", set_tensor("lm_head.weight", *HEAD))
    harness = Harness(config)
    assert not harness.speculator.drafter.ends.shares_head
    assert not torch.allclose(logits_of(harness), shared)


def test_an_embedding_of_its_own_embeds_unless_it_is_the_targets(tmp_path: Path) -> None:
    config = changed("glm", tmp_path / "other", set_tensor("model.embed_tokens.weight", *EMBEDDING))
    assert not Harness(config).speculator.drafter.ends.shares_embedding

    def copy(weights: Weights, config: Config) -> None:
        del config
        weights["model.embed_tokens.weight"] = MadeUpTarget().embedding.clone()

    config = changed("glm", tmp_path / "copy", copy)
    assert Harness(config).speculator.drafter.ends.shares_embedding


def test_what_training_leaves_in_a_checkpoint_is_not_needed(tmp_path: Path) -> None:
    def leave(weights: Weights, config: Config) -> None:
        del config
        weights["verifier_lm_head.weight"] = torch.full(HEAD, torch.nan)
        weights["t2d"] = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        weights["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)

    plain = logits_of(Harness(changed(SPECULATORS, tmp_path / "plain")))
    assert torch.equal(logits_of(Harness(changed(SPECULATORS, tmp_path / "left", leave))), plain)


def test_halves_load_for_a_run_in_another_dtype(tmp_path: Path) -> None:
    def halve(weights: Weights, config: Config) -> None:
        del config
        weights.update({name: weight.half() for name, weight in weights.items()})
        weights["lm_head.weight"] = torch.randn(HEAD).half()

    harness = Harness(changed("glm", tmp_path, halve), dtype=torch.bfloat16)
    parameters = [p for p in harness.speculator.drafter.parameters() if not p.is_meta]
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert harness.speculator.weight_bytes() == sum(p.nbytes for p in parameters)


def test_every_parameter_is_loaded_or_shared(tmp_path: Path) -> None:
    for name in FAMILIES:
        drafter = Harness(changed(name, tmp_path / name)).speculator.drafter
        shared = {n for n, p in drafter.state_dict(keep_vars=True).items() if p.is_meta}
        assert shared <= {
            "ends.embed_tokens.weight",
            "ends.lm_head.weight",
            "ends.d2t",
            *(f"steps.{i}.head.weight" for i in range(3)),
        }


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model.", ""])
def test_modules_are_found_below_other_roots(root: str, tmp_path: Path) -> None:
    def move(weights: Weights, config: Config) -> None:
        del config
        moved = {root + name.removeprefix("model."): w for name, w in weights.items()}
        weights.clear()
        weights.update(moved)

    plain = logits_of(Harness(changed("glm", tmp_path / "plain")))
    assert torch.equal(logits_of(Harness(changed("glm", tmp_path / "moved", move))), plain)


def test_the_level_transformer_of_a_name_is_left_out(tmp_path: Path) -> None:
    def move(weights: Weights, config: Config) -> None:
        del config
        for name in list(weights):
            if ".mlp." in name:
                weights[name.replace(".mlp.", ".transformer.mlp.")] = weights.pop(name)

    plain = logits_of(Harness(changed("step", tmp_path / "plain")))
    assert torch.equal(logits_of(Harness(changed("step", tmp_path / "moved", move))), plain)


def test_further_layers_of_a_family_with_one_projection_do_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(weights: Weights, config: Config) -> None:
        config["num_nextn_predict_layers"] = 2
        for name in list(weights):
            if ".layers.0." in name:
                weights[name.replace(".layers.0.", ".layers.1.")] = weights[name].clone()

    harness = Harness(changed("qwen3_next", tmp_path, add))
    assert len(harness.speculator.drafter.steps) == 1
    assert "MTP modules [1] do not run" in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_an_ordinary_checkpoint_warns_of_nothing(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Harness(changed(name, tmp_path))
    assert caplog.messages == []


def test_tensors_of_a_whole_target_are_told_where_it_is_named_as_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Harness(changed("glm", tmp_path, set_tensor("model.layers.0.mlp.up_proj.weight", 2, 2)))
    assert "tensors that nothing reads: model.layers.0.mlp.up_proj.weight" in caplog.text
