"""Rotary embeddings of every kind that drafters can use, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3NextConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from specreg.errors import CheckpointError
from specreg.nn.rotary import Rotary

HEAD_DIM, NUM_HEADS = 16, 3
POSITIONS = torch.tensor([0, 1, 2, 77, 1023, 40_000])
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 256,
    },
    "yarn with factors of its own": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}
# Equal but for the order of an fp32 product of up to 40,000 radians.
TOLERANCE = {"rtol": 0.0, "atol": 5e-3}


def states() -> torch.Tensor:
    """Queries `[rows, heads, head_dim]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(POSITIONS), NUM_HEADS, HEAD_DIM, generator=generator)


def as_theirs(x: torch.Tensor) -> torch.Tensor:
    """`[1, heads, rows, head_dim]`."""
    return x.transpose(0, 1)[None]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_turns_heads_as_transformers_does(kind: str) -> None:
    rope = KINDS[kind]
    theirs = llama.LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=dict(rope)))
    ours = Rotary.from_config({**SIZES, "rope_parameters": rope}, HEAD_DIM, CPU)
    torch.testing.assert_close(ours.inverse_frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.scaling == pytest.approx(theirs.attention_scaling)
    x = states()
    cos, sin = theirs(x, POSITIONS[None])
    expected, _ = llama.apply_rotary_pos_emb(as_theirs(x), as_theirs(x), cos, sin)
    torch.testing.assert_close(as_theirs(ours(POSITIONS).apply(x)), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_older_keys_say_the_same(kind: str) -> None:
    rope = dict(KINDS[kind])
    newer = Rotary.from_config({**SIZES, "rope_parameters": rope}, HEAD_DIM, CPU)
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    older = Rotary.from_config({**SIZES, "rope_theta": theta, "rope_scaling": rope}, HEAD_DIM, CPU)
    assert torch.equal(older.inverse_frequencies, newer.inverse_frequencies)
    assert older.scaling == newer.scaling


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_partial_embedding_turns_the_first_elements_alone(is_inside: bool) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
    inside = {**rope, "partial_rotary_factor": 0.25}
    theirs = qwen3_next.Qwen3NextRotaryEmbedding(Qwen3NextConfig(**SIZES, rope_parameters=inside))
    config = {"rope_parameters": inside}
    if not is_inside:
        config = {"rope_parameters": rope, "partial_rotary_factor": 0.25}
    angles = Rotary.from_config({**SIZES, **config}, HEAD_DIM, CPU)(POSITIONS)
    x = states()
    cos, sin = theirs(x, POSITIONS[None])
    expected, _ = qwen3_next.apply_rotary_pos_emb(as_theirs(x), as_theirs(x), cos, sin)
    turned = angles.apply(x)
    torch.testing.assert_close(as_theirs(turned), expected, **TOLERANCE)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.allclose(turned[1:, :, :4], x[1:, :, :4])


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_scaled_embedding_can_be_partial(kind: str) -> None:
    rope = {**KINDS[kind], "partial_rotary_factor": 0.5}
    theirs = llama.LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters=dict(rope)))
    ours = Rotary.from_config({**SIZES, "rope_parameters": rope}, HEAD_DIM, CPU)
    assert ours(POSITIONS).cos.shape == (len(POSITIONS), 1, HEAD_DIM // 2)
    torch.testing.assert_close(ours.inverse_frequencies, theirs.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_gemma_4_turns_by_layer_type(layer_type: str, factor: float | None) -> None:
    config = Gemma4TextConfig(
        hidden_size=64,
        num_hidden_layers=6,
        head_dim=8,
        global_head_dim=HEAD_DIM,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    if factor is not None:
        config.rope_parameters["full_attention"]["partial_rotary_factor"] = factor
    theirs = gemma4.Gemma4TextRotaryEmbedding(config)
    is_full = layer_type == "full_attention"
    x = states()[..., : HEAD_DIM if is_full else 8]
    rope = config.rope_parameters[layer_type]
    ours = Rotary.from_config({"rope_parameters": rope}, x.shape[-1], CPU)
    cos, sin = theirs(x, POSITIONS[None], layer_type)
    expected = gemma4.apply_rotary_pos_emb(x[None], cos, sin, unsqueeze_dim=2)[0]
    turned = ours(POSITIONS).apply(x)
    torch.testing.assert_close(turned, expected, **TOLERANCE)
    if is_full:  # pairs (j, j + half) of the first quarter, or half, of the pairs
        half, num_pairs = HEAD_DIM // 2, int((factor or 0.25) * HEAD_DIM / 2)
        for start in (0, half):
            rest = slice(start + num_pairs, start + half)
            assert torch.equal(turned[..., rest], x[..., rest])
        # Wavelengths are those of the whole head, not of the part that turns.
        assert ours.inverse_frequencies[1] == pytest.approx(1e6 ** (-2 / HEAD_DIM))


def test_heads_keep_their_type_and_length() -> None:
    rotary = Rotary.from_config({"rope_parameters": KINDS["default"]}, HEAD_DIM, CPU)
    x = states()
    turned = rotary(POSITIONS).apply(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)
    assert rotary(POSITIONS).apply(x.bfloat16()).dtype == torch.bfloat16


def test_scores_depend_on_distance_alone() -> None:
    rotary = Rotary.from_config({"rope_parameters": KINDS["default"]}, HEAD_DIM, CPU)
    query, key = states()[:1], states()[1:2]

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotary(torch.tensor([position])).apply(x)
            for position, x in ((query_position, query), (key_position, key))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(130, 127) == pytest.approx(score(8, 5), abs=1e-3)
    assert score(8, 4) != pytest.approx(score(8, 5), abs=1e-2)


def test_settings_of_several_layer_types_are_not_read_as_one() -> None:
    rope = {"sliding_attention": KINDS["default"], "full_attention": KINDS["linear"]}
    with pytest.raises(CheckpointError, match="objects named sliding_attention, full_attention"):
        Rotary.from_config({"rope_parameters": rope}, HEAD_DIM, CPU)


def test_positions_of_pictures_turn_text_as_plain_ones() -> None:
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    theirs = Rotary.from_config({"rope_theta": 5000.0, "rope_scaling": rope}, HEAD_DIM, CPU)
    plain = Rotary.from_config({"rope_theta": 5000.0}, HEAD_DIM, CPU)
    assert torch.equal(theirs.inverse_frequencies, plain.inverse_frequencies)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": "10000"}, "a.json, key 'rope_theta'.*'10000'; allowed: a number"),
        ({"rope_theta": 0}, "rope_theta 0, .*a positive number"),
        ({"rope_parameters": {"rope_theta": 0}, "rope_theta": 5.0}, "rope_theta 0, "),
        ({"rope_theta": float("nan")}, "key 'rope_theta'.*nan; allowed: a finite number"),
        ({"rope_theta": -1.5}, "rope_theta -1.5"),
        ({"rope_parameters": {"rope_theta": [1]}}, "a.json, rope_parameters, key 'rope_theta'"),
        ({"rope_scaling": "default"}, "a.json, key 'rope_scaling'.*allowed: an object"),
        ({"rope_parameters": [1]}, "key 'rope_parameters'.*allowed: an object"),
        ({"rope_scaling": {"rope_type": 5}}, "key 'rope_type'.*5; allowed: a string"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "a.json, rope_parameters, rope_type"),
        ({"partial_rotary_factor": "half"}, "key 'partial_rotary_factor'.*allowed: a number"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of 16 elements"),
        ({"partial_rotary_factor": 0.2}, "0.2 of 16 elements; .*an even number of elements"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor 0 of"),
    ],
)
def test_wrong_settings_are_refused_by_file_and_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        Rotary.from_config(config, HEAD_DIM, CPU, "a.json")
