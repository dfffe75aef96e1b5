"""What no recorded case has, against heads that are written out once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import EAGLE1, EAGLE3, SIZES, Reference, rows_until, save_head
from golden_cases import GoldenCase, Replay

SLIDING = ["sliding_attention", "full_attention"]
EAGLE1_VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bias": {"bias": True},
    "two layers": {"num_hidden_layers": 2},
    "logit scale": {"logit_scale": 0.5},
    "biases of attention": {"attention_bias": True},
    "Mistral": {"architectures": ["EagleMistralForCausalLM"], "num_hidden_layers": 2},
}
EAGLE3_VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a norm a state": {"fc_norm": True},
    "both norms before the projection": {"fc_norm": True, "norm_before_fc": True},
    "the nested key wins": {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
    "logit scale": {"logit_scale": 2.0},
    "normed residual and output": {"norm_before_residual": True, "norm_output": True},
    "a window in one layer": {
        "num_hidden_layers": 2,
        "layer_types": SLIDING,
        "sliding_window": 4,
    },
    "three layers": {"num_hidden_layers": 3},
    "norms of the heads": {"architectures": ["Eagle3Qwen3ForCausalLM"], "attention_bias": True},
    "narrower than the target": {
        "hidden_size": 48,
        "target_hidden_size": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}


def agrees(
    case: GoldenCase, method: str, directory: Path, config: dict[str, Any], states: str
) -> None:
    replay = Replay(case, {"method": method, "model": str(directory)}, directory)
    reference = Reference(directory, config)
    for index, proposed in replay.rounds(chunk=5):
        ids, target_states = rows_until(case, index, states)
        wanted = reference.logits(ids, target_states, proposed.tokens)
        torch.testing.assert_close(proposed.logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", EAGLE1_VARIANTS)
def test_eagle1_variants_agree(variant: str, tmp_path: Path) -> None:
    config = {**EAGLE1, **EAGLE1_VARIANTS[variant]}
    save_head(tmp_path, config)
    agrees(GoldenCase("eagle1-1"), "eagle", tmp_path, config, "target_hidden")


@pytest.mark.parametrize("variant", EAGLE3_VARIANTS)
def test_eagle3_variants_agree(variant: str, tmp_path: Path) -> None:
    config = {**EAGLE3, **EAGLE3_VARIANTS[variant]}
    save_head(tmp_path, config)
    agrees(GoldenCase("eagle3-1"), "eagle3", tmp_path, config, "aux_hidden")


def test_a_bias_on_the_output_projection_is_where_the_file_has_one(tmp_path: Path) -> None:
    config = {**EAGLE3, "attention_bias": True}
    save_head(tmp_path, config, without=("layers.0.self_attn.o_proj.bias",))
    agrees(GoldenCase("eagle3-1"), "eagle3", tmp_path, config, "aux_hidden")


def test_a_head_without_a_projection_reads_the_last_state(tmp_path: Path) -> None:
    config = {**SIZES, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 96}
    config["eagle_config"] = {"use_aux_hidden_state": False}
    save_head(tmp_path, config)
    agrees(GoldenCase("eagle1-1"), "eagle3", tmp_path, config, "target_hidden")


def test_embedding_and_head_are_the_targets_where_the_file_has_none(tmp_path: Path) -> None:
    config = {**EAGLE3, "draft_vocab_size": 160}
    save_head(tmp_path, config, without=("embed_tokens.weight", "lm_head.weight", "d2t"))
    agrees(GoldenCase("eagle3-1"), "eagle3", tmp_path, config, "aux_hidden")


def test_the_projection_of_mistral_has_a_name_of_its_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = {**EAGLE1, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    save_head(tmp_path, config)
    reference = Reference(tmp_path, config)
    weights = load_file(tmp_path / "model.safetensors")
    weights["eagle_linear.weight"] = weights.pop("fc.weight")
    save_file(weights, tmp_path / "model.safetensors")
    case = GoldenCase("eagle1-1")
    replay = Replay(case, {"method": "eagle", "model": str(tmp_path)}, tmp_path)
    _, proposed = next(iter(replay.rounds()))
    ids, states = rows_until(case, 1, "target_hidden")
    wanted = reference.logits(ids, states, proposed.tokens)
    torch.testing.assert_close(proposed.logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "names",
    [
        {"architectures": ["PEagleDraftModel"], "mask_token_id": 3},
        {"architectures": ["PeagleQwen3ForCausalLM"], "pard_token": 3},
        {"ptd_token_id": 3},
        {"dspark_noise_token_id": 3},
    ],
)
def test_flat_configs_draft_in_one_pass_too(names: dict[str, Any], tmp_path: Path) -> None:
    """Each mask row reads the mask token and the projected mask state, as rows of the target do."""
    config = {**EAGLE3, **names}
    save_head(tmp_path, config)
    case = GoldenCase("eagle3-1")
    replay = Replay(case, {"method": "eagle3", "model": str(tmp_path)}, tmp_path)
    assert replay.speculator.spec.name == "peagle"
    reference = Reference(tmp_path, config)
    mask = reference.weights["mask_hidden"][0]
    for index, proposed in replay.rounds(chunk=5):
        ids, states = rows_until(case, index, "aux_hidden")
        num_masks = len(proposed.tokens) - 1
        ids = torch.cat([ids, torch.full((num_masks,), 3)])
        states = torch.cat([states.double(), mask.expand(num_masks, -1)])
        scored, _ = reference.layers(ids, reference.fused(states))
        wanted = (scored[-len(proposed.tokens) :] @ reference.head.T).float()
        torch.testing.assert_close(proposed.logits, wanted, atol=1e-4, rtol=1e-4)
