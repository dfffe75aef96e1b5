"""The modules that drafters share, against the same arithmetic in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from specreg.capabilities import KVLayerSpec
from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg.nn.attention import Attention
from specreg.nn.decoder_layer import DecoderLayer
from specreg.nn.mlp import activation
from specreg.nn.norms import RMSNorm
from specreg.nn.rotary import Rotary
from specreg.nn.shape import DecoderShape
from specreg.runtime.kv_pool import KVPool
from specreg.speculator import KVRows

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
CPU = torch.device("cpu")


def shape(**config: Any) -> DecoderShape:
    known = {k: config.pop(k) for k in list(config) if k.startswith("has_")}
    return DecoderShape.read(ConfigReader({**SIZES, **config}, "config.json"), **known)


def filled(module: nn.Module) -> nn.Module:
    """A module with weights, none of them neutral."""
    torch.manual_seed(0)
    module.to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.data = centre + 0.3 * torch.randn_like(parameter)
    return module.requires_grad_(False)


def pool(specs: tuple[KVLayerSpec, ...]) -> Any:
    made = KVPool(
        specs,
        num_blocks=8,
        block_size=4,
        max_num_seqs=2,
        max_model_len=32,
        dtype=torch.float32,
        device=CPU,
    )
    made.assign([(0, 0, range(8))])
    return made.view()


@pytest.mark.parametrize(
    ("model_type", "layer_type", "rotary_type", "config"),
    [
        ("llama", LlamaDecoderLayer, LlamaRotaryEmbedding, {}),
        ("llama", LlamaDecoderLayer, LlamaRotaryEmbedding, {"attention_bias": True}),
        ("llama", LlamaDecoderLayer, LlamaRotaryEmbedding, {"mlp_bias": True}),
        ("qwen3", Qwen3DecoderLayer, Qwen3RotaryEmbedding, {"has_head_norms": True}),
    ],
)
def test_a_decoder_layer_computes_what_transformers_does(
    model_type, layer_type, rotary_type, config
):
    ours = shape(**config)
    layer = filled(DecoderLayer(ours, 0))
    theirs_config = AutoConfig.for_model(
        model_type, **{**SIZES, **{k: v for k, v in config.items() if "has_" not in k}}
    )
    theirs_config.rope_parameters = {"rope_type": "default", "rope_theta": SIZES["rope_theta"]}
    theirs_config._attn_implementation = "eager"
    theirs = layer_type(theirs_config, 0)
    theirs.load_state_dict(layer.state_dict())
    x, positions = torch.randn(7, 32), torch.arange(7)
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    cos_sin = rotary_type(theirs_config)(x[None], positions[None])
    expected = theirs(x[None], attention_mask=mask, position_embeddings=cos_sin)
    expected = expected[0] if isinstance(expected, tuple) else expected
    rows = KVRows.causal(torch.zeros(7, dtype=torch.int64), positions, (0, 7))
    got = layer(x, ours.rotary(CPU)(positions), rows, pool(ours.kv_specs))
    torch.testing.assert_close(got, expected.view(7, 32), atol=2e-5, rtol=1e-5)


def test_rows_fed_one_by_one_give_the_same_as_all_at_once():
    ours = shape(has_head_norms=True, has_gated_attention=True, sliding_window=3)
    layer, rotary = filled(DecoderLayer(ours, 0)), ours.rotary(CPU)
    x, zeros = torch.randn(6, 32), torch.zeros(6, dtype=torch.int64)
    positions, whole, single = torch.arange(6), pool(ours.kv_specs), pool(ours.kv_specs)
    together = layer(x, rotary(positions), KVRows.causal(zeros, positions), whole)
    apart = [
        layer(x[[i]], rotary(positions[[i]]), KVRows.causal(zeros[[i]], positions[[i]]), single)
        for i in range(6)
    ]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=1e-5)
    assert ours.kv_specs[0].sliding_window == 3


def test_a_zero_centred_norm_scales_by_one_plus_the_weight():
    ours = filled(RMSNorm(16, 1e-6, is_zero_centred=True))
    theirs = Qwen3_5RMSNorm(16, eps=1e-6)
    theirs.load_state_dict(ours.state_dict())
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 16).to(dtype)
        assert torch.equal(ours(x), theirs(x))


class TestTheShape:
    def test_takes_windows_from_the_layer_types(self):
        types = ["full_attention", "sliding_attention"]
        assert shape(layer_types=types, sliding_window=4).sliding_windows == (None, 4)
        assert shape(sliding_window=4).sliding_windows == (4, 4)
        assert shape(sliding_window=4, use_sliding_window=False).sliding_windows == (None, None)
        with pytest.raises(CheckpointError, match="lacks 'sliding_window'"):
            shape(layer_types=types)
        with pytest.raises(CheckpointError, match="linear_attention"):
            shape(layer_types=["linear_attention", "full_attention"])

    def test_divides_the_hidden_size_where_the_head_dim_is_absent(self):
        assert shape(head_dim=None).head_dim == 8
        assert shape(num_key_value_heads=None).num_kv_heads == 4
        with pytest.raises(CheckpointError, match="num_key_value_heads 3; allowed: a multiple"):
            shape(num_key_value_heads=3)
        with pytest.raises(CheckpointError, match="num_attention_heads 36; allowed: fewer heads"):
            shape(head_dim=None, num_attention_heads=36)


class TestRotary:
    def test_reads_older_and_newer_keys_alike(self):
        newer = Rotary.from_config({"rope_parameters": {"rope_theta": 5000.0}}, 16, CPU)
        older = Rotary.from_config({"rope_theta": 5000.0}, 16, CPU)
        assert torch.equal(newer.inverse_frequencies, older.inverse_frequencies)

    def test_leaves_the_rest_of_a_partly_rotated_head_alone(self):
        angles = Rotary.from_config({"partial_rotary_factor": 0.5}, 16, CPU)(torch.tensor([3]))
        x = torch.randn(1, 2, 16)
        turned = angles.apply(x)
        assert torch.equal(turned[..., 8:], x[..., 8:])
        assert not torch.equal(turned[..., :8], x[..., :8])

    def test_refuses_kinds_that_depend_on_the_length(self):
        with pytest.raises(CheckpointError, match="'dynamic'; allowed: default"):
            Rotary.from_config({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 16, CPU)
        with pytest.raises(CheckpointError, match="not complete"):
            Rotary.from_config({"rope_scaling": {"rope_type": "llama3"}}, 16, CPU)


def test_an_unknown_activation_gets_the_nearest_spelling():
    with pytest.raises(CheckpointError, match="did you mean 'silu'"):
        activation("sillu")
    with pytest.raises(CheckpointError, match=r"config\.json, hidden_act"):
        DecoderLayer(shape(hidden_act="sillu"), 0)


def test_what_a_window_without_layer_types_means_depends_on_the_model() -> None:
    qwen = {"model_type": "qwen3", "sliding_window": 4}
    assert shape(**qwen).sliding_windows == (None, None)
    assert shape(**qwen, use_sliding_window=True).sliding_windows == (None, None)
    used = shape(**qwen, use_sliding_window=True, max_window_layers=1)
    assert used.sliding_windows == (None, 4)
    assert shape(model_type="mistral", sliding_window=4).sliding_windows == (4, 4)
    assert shape(model_type="llama", sliding_window=4).sliding_windows == (None, None)


def test_sinks_and_a_scale_of_values_join_attention() -> None:
    plain = shape()
    special = DecoderShape.read(ConfigReader(SIZES, "config.json"), has_sinks=True, value_scale=0.5)
    bare, layer = Attention(plain, 0), filled(Attention(special, 0))
    bare.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "sinks"}, assign=True)
    x, rotary = torch.randn(1, 32), plain.rotary(CPU)
    rows = KVRows.causal(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with_sink = layer(x, rotary(rows.positions), rows, pool(special.kv_specs))
    # One key: its weight is 1 without a sink.
    query, _ = layer.queries(x, rotary(rows.positions))
    key, value = layer.keys_values(x, rotary(rows.positions))
    score = (query.view(2, 2, 16) * key.view(2, 1, 16)).sum(-1).flatten() * 16**-0.5
    weight = score.exp() / (score.exp() + layer.sinks.exp())
    spread = value.view(2, 1, 16).expand(2, 2, 16).reshape(4, 16) * weight[:, None]
    torch.testing.assert_close(with_sink, layer.o_proj(spread.flatten()[None]))
    _, unscaled = bare.keys_values(x, rotary(rows.positions))
    torch.testing.assert_close(value, 0.5 * unscaled)
