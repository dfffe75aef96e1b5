"""Hugging Face decoders over paged keys and values against transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specreg.errors import CheckpointError, TargetError
from specreg.nn import hf_probe
from specreg.nn.hf_decoder import HFDecoder
from specreg.nn.kv_specs import kv_specs_from_config
from specreg.nn.lm_head import LMHead
from specreg.speculator import KVRows, KVView
from specreg.testing.packed import PackedRequests
from specreg.testing.tiny_models import TINY_MODELS, TINY_VOCAB_SIZE, save_tiny_model

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

LENGTHS = (23, 5, 17)  # the first and last outgrow every tiny window of 7
# A kind whose architecture the installed transformers does not know yet is left out.
KINDS = sorted(kind for kind in TINY_MODELS if TINY_MODELS[kind]["model_type"] in CONFIG_MAPPING)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    @lru_cache
    def directory(kind: str) -> Path:
        return save_tiny_model(kind, root / kind)

    return directory


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(TINY_VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


def own_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@torch.no_grad()
def own_logits(directory: Path, prompt: list[int]) -> Tensor:
    return own_model(directory)(torch.tensor([prompt])).logits[0]


def check(decoder: HFDecoder, directory: Path, states: list[list[Tensor]]) -> None:
    for prompt, parts in zip(prompts(), states, strict=True):
        logits = decoder.compute_logits(torch.cat(parts))
        expected = own_logits(directory, prompt)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_packed_prompts_have_the_models_own_logits(kind: str, tiny: Callable[[str], Path]) -> None:
    decoder = HFDecoder.load(tiny(kind))
    requests = PackedRequests(decoder, len(LENGTHS))
    outputs = requests.step([(slot, 0, p) for slot, p in enumerate(prompts())], num_padding=3)
    check(decoder, tiny(kind), [[output.hidden] for output in outputs])


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_size_have_the_models_own_logits(
    kind: str, tiny: Callable[[str], Path]
) -> None:
    decoder = HFDecoder.load(tiny(kind))
    requests = PackedRequests(decoder, len(LENGTHS))
    done = [0] * len(LENGTHS)
    states: list[list[Tensor]] = [[] for _ in LENGTHS]
    # Requests start late, stall and end early, so every step packs other company.
    for sizes in [(9, 0, 1), (1, 1, 6), (6, 3, 0), (0, 1, 9), (7, 0, 1)]:
        live = [slot for slot, size in enumerate(sizes) if size]
        parts = [(s, done[s], prompts()[s][done[s] : done[s] + sizes[s]]) for s in live]
        for slot, output in zip(live, requests.step(parts), strict=True):
            states[slot].append(output.hidden)
            done[slot] += sizes[slot]
    check(decoder, tiny(kind), states)


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_rows_leave_no_trace_once_overwritten(
    kind: str, tiny: Callable[[str], Path]
) -> None:
    decoder = HFDecoder.load(tiny(kind))
    requests = PackedRequests(decoder, len(LENGTHS))
    states: list[list[Tensor]] = [[] for _ in LENGTHS]
    half = [length // 2 for length in LENGTHS]
    for slot, output in enumerate(
        requests.step([(s, 0, p[: half[s]]) for s, p in enumerate(prompts())])
    ):
        states[slot].append(output.hidden)
    # Two right tokens, then five wrong ones that a later step takes back.
    wrong = [5, 99, 0, 42, 7]
    guessed = [(s, half[s], p[half[s] : half[s] + 2] + wrong) for s, p in enumerate(prompts())]
    for slot, output in enumerate(requests.step(guessed)):
        states[slot].append(output.hidden[:2])
    rest = [(s, half[s] + 2, p[half[s] + 2 :]) for s, p in enumerate(prompts())]
    rest = [part for part in rest if part[2]]
    for (slot, *_), output in zip(rest, requests.step(rest), strict=True):
        states[slot].append(output.hidden)
    check(decoder, tiny(kind), states)


class Forgetful:
    """A KV view that drops one option of attention."""

    def __init__(self, view: KVView, option: str) -> None:
        self.view, self.option = view, option
        self.write = view.write

    def attend(self, layer: int, query: Tensor, rows: KVRows, **options: Any) -> Tensor:
        options[self.option] = 1.0 if self.option == "scale" else None
        return self.view.attend(layer, query, rows, **options)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("mistral", "sliding_window"),
        ("gemma2", "sliding_window"),
        ("gemma2", "soft_cap"),
        ("gemma3", "sliding_window"),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "sinks"),
        ("llama", "scale"),
    ],
)
def test_the_comparison_notices_a_dropped_option(
    kind: str, option: str, tiny: Callable[[str], Path]
) -> None:
    # Largest difference of the logits: 6.2, 3.9, 3.6, 4.4, 7.7, 6.5, 5.2; with the option, < 1e-5.
    decoder = HFDecoder.load(tiny(kind))
    requests = PackedRequests(decoder, 1)
    requests.kv = Forgetful(requests.kv, option)
    (output,) = requests.step([(0, 0, prompts()[0])])
    difference = decoder.compute_logits(output.hidden) - own_logits(tiny(kind), prompts()[0])
    assert difference.abs().max() > 1


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_half_precision_stays_close_to_the_models_own(
    kind: str, tiny: Callable[[str], Path]
) -> None:
    decoder = HFDecoder.load(tiny(kind), dtype=torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    (output,) = PackedRequests(decoder, 1).step([(0, 0, prompts()[0])])
    logits = decoder.compute_logits(output.hidden).float()
    expected = own_logits(tiny(kind), prompts()[0])
    assert ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_stream_is_captured_by_entry(kind: str, tiny: Callable[[str], Path]) -> None:
    decoder = HFDecoder.load(tiny(kind))
    entries = (4, 0, 2)
    prompt = prompts()[0]
    (output,) = PackedRequests(decoder, 1).step([(0, 0, prompt)], aux_layer_ids=entries)
    assert list(output.aux) == [0, 2, 4]
    model = own_model(tiny(kind))
    streams: list[Tensor] = []
    for layer in [*model.model.layers, model.model.norm]:
        layer.register_forward_pre_hook(lambda _, args: streams.append(args[0][0]))
    with torch.no_grad():
        model(torch.tensor([prompt]))
    for entry in entries:
        assert (output.aux[entry] - streams[entry]).abs().max() < 1e-4
    if kind not in {"granite", "gemma2"}:  # these may scale their embeddings further on
        assert torch.equal(output.aux[0], decoder.embed(torch.tensor(prompt)))


def test_the_stream_before_the_final_norm_is_given_on_request(
    tiny: Callable[[str], Path],
) -> None:
    decoder = HFDecoder.load(tiny("llama"))
    requests = PackedRequests(decoder, 1)
    rows = KVRows.causal(torch.zeros(5, dtype=torch.int64), torch.arange(5))
    ids = torch.tensor(prompts()[1])
    output = decoder.forward(ids, rows, requests.kv, pre_norm=True)
    assert output.pre_norm is not None
    norm = own_model(tiny("llama")).model.norm
    assert (norm(output.pre_norm) - output.hidden).abs().max() < 1e-6
    again = decoder.forward(ids, rows, requests.kv)
    assert again.pre_norm is None
    assert again.aux == {}
    assert torch.equal(again.hidden, output.hidden)


def test_an_entry_that_is_not_there_is_refused(tiny: Callable[[str], Path]) -> None:
    decoder = HFDecoder.load(tiny("llama"))
    with pytest.raises(TargetError, match=r"no residual stream(.|\n)*allowed: 0\.\.4"):
        PackedRequests(decoder, 1).step([(0, 0, [1])], aux_layer_ids=[5])


@pytest.mark.parametrize("kind", KINDS)
def test_kv_specs_are_the_same_on_paper_and_in_memory(
    kind: str, tiny: Callable[[str], Path]
) -> None:
    decoder = HFDecoder.load(tiny(kind))
    assert kv_specs_from_config(decoder.config) == decoder.kv_specs
    assert len(decoder.kv_specs) == decoder.num_layers == 4
    windows = [spec.sliding_window for spec in decoder.kv_specs]
    assert windows == {
        "mistral": [7, 7, 7, 7],
        "gemma2": [7, None, 7, None],
        "gemma3": [7, 7, None, 7],
        "gemma4": [7, None, 7, None],
        "gpt_oss": [7, None, 7, None],
    }.get(kind, [None] * 4)


def test_tied_heads_are_told_from_untied_ones(tiny: Callable[[str], Path]) -> None:
    tied, untied = HFDecoder.load(tiny("llama_tied")), HFDecoder.load(tiny("llama"))
    assert tied.is_head_tied
    assert not untied.is_head_tied
    assert untied.weight_bytes - tied.weight_bytes == TINY_VOCAB_SIZE * 32 * 4


def test_rows_of_the_head_beyond_the_vocabulary_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("llama", tmp_path)
    model = own_model(tmp_path)
    expected = own_logits(tmp_path, prompts()[0])
    model.resize_token_embeddings(128)
    model.config.vocab_size = TINY_VOCAB_SIZE
    decoder = HFDecoder(model)
    (output,) = PackedRequests(decoder, 1).step([(0, 0, prompts()[0])])
    assert decoder.vocab_size == TINY_VOCAB_SIZE
    assert (decoder.compute_logits(output.hidden) - expected).abs().max() < 1e-4


RECURRENT = {
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {"attention_window_size": 7, "lru_width": 32},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
    "bamba": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"num_local_experts": 2},
}
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("model_type", sorted(RECURRENT))
def test_recurrent_and_convolutional_targets_are_refused_by_the_name_of_the_layer(
    model_type: str,
) -> None:
    config = AutoConfig.for_model(model_type, **{**COMMON, **RECURRENT[model_type]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(TargetError, match=r"where: (\w+\.)*(layers|blocks)\.[01]"):
        HFDecoder(model)


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "gpt_neox_japanese"])
def test_models_that_bypass_the_registered_attention_are_refused_by_name(model_type: str) -> None:
    sizes = {
        "n_layer": 2,
        "n_head": 4,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
    }
    config = AutoConfig.for_model(model_type, **{**COMMON, **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(TargetError, match=r"does not attend through(.|\n)*\.0\n(.|\n)*0 calls"):
        HFDecoder(model)


def llama(tiny: Callable[[str], Path]) -> Any:
    return own_model(tiny("llama"))


def test_a_convolution_hidden_beside_attention_is_refused(tiny: Callable[[str], Path]) -> None:
    model = llama(tiny)
    model.model.layers[2].mlp.mixer = nn.Conv1d(32, 32, 3)
    with pytest.raises(TargetError, match=r"where: model\.layers\.2\.mlp\.mixer"):
        HFDecoder(model)


def test_a_state_that_only_running_shows_is_refused_at_its_layer(
    tiny: Callable[[str], Path],
) -> None:
    model = llama(tiny)

    def mix_neighbours(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] + args[0].roll(1, dims=1),)

    model.model.layers[1].mlp.register_forward_pre_hook(mix_neighbours)
    with pytest.raises(TargetError, match=r"do not reproduce(.|\n)*after model\.layers\.1\n"):
        HFDecoder(model)


def test_a_mask_rule_unlike_the_window_is_refused(tiny: Callable[[str], Path]) -> None:
    model = own_model(tiny("mistral"))
    for layer in model.model.layers[1:]:
        layer.self_attn.config = type(model.config)(**model.config.to_dict())
        layer.self_attn.config.sliding_window = 50_000
        layer.self_attn.config._attn_implementation = "specreg_probe"
    with pytest.raises(
        TargetError, match=r"layers\.1 (.|\n)*a mask unlike its sliding_window 50000"
    ):
        HFDecoder(model)


def test_chunked_attention_is_refused(tiny: Callable[[str], Path]) -> None:
    rule = hf_probe.MaskRule(lambda b, h, q, k: (k <= q) & (q // 8192 == k // 8192))
    assert not hf_probe._is_causal_window(rule, None)
    causal = hf_probe.MaskRule(lambda b, h, q, k: k <= q)
    assert hf_probe._is_causal_window(causal, None)
    assert not hf_probe._is_causal_window(causal, 4096)


def test_an_option_that_nothing_honours_is_refused_by_name(tiny: Callable[[str], Path]) -> None:
    model = llama(tiny)
    model.model.layers[3].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "position_bias": torch.zeros(1)}),
        with_kwargs=True,
    )
    with pytest.raises(TargetError, match=r"layers\.3 (.|\n)*options position_bias"):
        HFDecoder(model)


def test_logits_that_are_no_linear_head_are_refused(tiny: Callable[[str], Path]) -> None:
    model = llama(tiny)
    model.lm_head.register_forward_hook(lambda _, args, output: output.sin())
    with pytest.raises(TargetError, match="logits are not those of the head"):
        HFDecoder(model)


def test_a_forward_that_fails_is_reported_with_its_reason(tiny: Callable[[str], Path]) -> None:
    model = llama(tiny)

    def fail(*_: object) -> None:
        raise ValueError("no such tensor")

    model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(TargetError, match=r"cannot run packed requests(.|\n)*no such tensor"):
        HFDecoder(model)


def test_a_config_that_is_read_wrongly_is_refused_at_its_layer(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = kv_specs_from_config(HFDecoder.load(tiny("llama")).config)
    monkeypatch.setattr(
        hf_probe, "kv_specs_from_config", lambda _: (*specs[:3], specs[0].__class__(1, 8))
    )
    with pytest.raises(TargetError, match=r"disagree about a layer(.|\n)*model\.layers\.3"):
        HFDecoder.load(tiny("llama"))


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", vocab_size=97, d_model=32).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TargetError, match="encoder-decoder"):
        HFDecoder.load(tmp_path)


def test_a_parameter_that_the_checkpoint_does_not_fill_is_named(
    tmp_path: Path, tiny: Callable[[str], Path]
) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, model\.layers\.1\.mlp\.up_proj"):
        HFDecoder.load(tmp_path)


def test_a_directory_without_a_model_that_transformers_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        HFDecoder.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"cannot be loaded(.|\n)*no_such_model"):
        HFDecoder.load(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights"):
        HFDecoder.load(tmp_path)


def test_positions_that_depend_on_the_company_bound_the_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    save_tiny_model("llama", tmp_path, rope_parameters=rope)
    assert HFDecoder.load(tmp_path).max_model_len == 64


def test_slices_of_a_head_are_columns_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    head = LMHead(
        torch.randn(11, 8, generator=generator),
        torch.randn(11, generator=generator),
        multiplier=0.7,
        divisor=1.3,
        soft_cap=2.0,
    )
    hidden = torch.randn(3, 8, generator=generator)
    expected = ((hidden @ head.weight.T + head.bias) * 0.7 / 1.3 / 2.0).tanh() * 2.0
    assert (head(hidden) - expected).abs().max() < 1e-6
    parts = [head.rows(start, min(start + 4, 11))(hidden) for start in (0, 4, 8)]
    assert (torch.cat(parts, dim=-1) - expected).abs().max() < 1e-6
    assert head.rows(4, 8).weight.data_ptr() == head.weight[4:].data_ptr()
    assert head.rows(4, 8).clone().weight.data_ptr() != head.weight[4:].data_ptr()
