"""Gemma 4 assistants against `transformers`' own classes and its own way of drafting with them.

`transformers` stands one position further than the speculator (its newest token's), lets a sliding
layer see one key more than the window, and after a rejection shows the key of the first rejected
token. The comparisons run our modules that way; the last test pins the speculator's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_host import SLOT, Host, K
from specreg_mtp.gemma4_checkpoint import load_assistant, read_config
from specreg_mtp.gemma4_modules import Assistant
from torch import Tensor

from specreg.checkpoint import Checkpoint
from specreg.speculator import KVRows
from specreg.testing.batches import prompt_batch
from specreg.testing.tiny_models import save_tiny_model

transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 99
PROMPT = [5, 61, 17, 33, 80, 4, 29, 71, 12, 55, 90, 44]
WINDOW = 7
LAYER_TYPES = {
    "gemma4": ["sliding_attention", "sliding_attention", "full_attention"],
    "gemma4_unified": ["full_attention", "sliding_attention", "full_attention"],
}


def save_target(directory: Path, **keys: Any) -> Path:
    return save_tiny_model("gemma4", directory, vocab_size=VOCAB_SIZE, eos_token_id=None, **keys)


def save_assistant(directory: Path, kind: str = "gemma4", **keys: Any) -> Any:
    """An assistant of `transformers`' own, none of whose weights is neutral."""
    prefix = "Gemma4" if kind == "gemma4" else "Gemma4Unified"
    text = getattr(transformers, f"{prefix}TextConfig")(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        layer_types=list(LAYER_TYPES[kind]),
        sliding_window=WINDOW,
        initializer_range=0.3,
        tie_word_embeddings=keys.get("tie_word_embeddings", True),
        **(
            {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
            if kind == "gemma4"
            else {}
        ),
    )
    config = getattr(transformers, f"{prefix}AssistantConfig")(
        text_config=text, backbone_hidden_size=32, num_centroids=11, **keys
    )
    config.centroid_intermediate_top_k = 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = getattr(transformers, f"{prefix}AssistantForCausalLM")(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
            else:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        for layer in model.model.layers:
            layer.layer_scalar += 0.2 * torch.randn(1)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    model.eval().set_attn_implementation("eager")
    model.generation_config.num_assistant_tokens = K
    model.save_pretrained(directory)
    return model


def run_target(target: Any, token_ids: list[int]) -> Any:
    """A whole forward, with what assisted drafting takes from it."""
    with torch.no_grad():
        return target(
            input_ids=torch.tensor([token_ids]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )


class Theirs:
    """`transformers`' candidate generator, asked for one round at a time."""

    def __init__(self, target: Any, assistant: Any) -> None:
        from transformers.generation.candidate_generator import (
            SinglePositionMultiTokenCandidateGenerator,
        )

        self.target = target
        self.generator = SinglePositionMultiTokenCandidateGenerator(
            assistant_model=assistant,
            target_model_input_embeddings=target.get_input_embeddings(),
            generation_config=transformers.GenerationConfig(max_length=100),
        )

    def draft(self, read: list[int], num_rejected: int, newest: int) -> tuple[list[int], Tensor]:
        """Drafts and logits `[K, vocab_size]` after the target has read `read`."""
        valid = read[: len(read) - num_rejected]
        outputs = run_target(self.target, read)
        # What a cached step would have given: the states of the tokens it read, the round's own.
        is_first = self.generator.is_main_model_prefill
        if not is_first:
            outputs.hidden_states = tuple(h[:, -1 - K :] for h in outputs.hidden_states)
        ids, logits = self.generator.get_candidates(
            torch.tensor([[*valid, newest]]),
            model_kwargs={},
            model_outputs=outputs,
            is_first_iteration=False,
            n_last_matches=K - num_rejected,
        )
        return ids[0, len(valid) + 1 :].tolist(), logits[0]


def ours(
    assistant: Assistant, host: Host, state: Tensor, newest: int, position: int, num_keys: int
) -> tuple[list[int], Tensor]:
    """The loop of the speculator over our modules, at a position and over keys of our choice."""
    shared = host.speculator.shared_layers
    kv = {kind: host.target.kv(layer.index) for kind, layer in shared.items()}
    rows = KVRows(torch.tensor([SLOT]), torch.tensor([num_keys - 1]), torch.tensor([num_keys]))
    angles = assistant.angles(torch.tensor([position]))
    token_ids, states = torch.tensor([newest]), state[None]
    tokens, logits = [], []
    for _ in range(K):
        to_score, states = assistant(host.target.embed(token_ids), states, angles, rows, kv)
        logits.append(assistant.score(to_score)[0])
        token_ids = logits[-1].argmax()[None]
        tokens.append(int(token_ids))
    return tokens, torch.stack(logits)


def check_equal(mine: tuple[list[int], Tensor], theirs: tuple[list[int], Tensor]) -> None:
    """Equal tokens and logits; where ours are -inf, theirs lie below all that were scored."""
    assert mine[0] == theirs[0]
    scored = mine[1].isfinite()
    torch.testing.assert_close(mine[1][scored], theirs[1][scored], rtol=1e-4, atol=1e-4)
    for row, is_scored in zip(theirs[1], scored, strict=True):
        assert (row[~is_scored] < row[is_scored].min()).all()


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
@pytest.mark.parametrize(
    "head",
    [
        {},
        {"tie_word_embeddings": False},
        {"use_ordered_embeddings": True},
        {"use_ordered_embeddings": True, "tie_word_embeddings": False},
    ],
    ids=["tied", "untied", "ordered", "ordered, untied"],
)
def test_our_modules_draft_what_assisted_generation_drafts(
    target_path: Path, tmp_path: Path, kind: str, head: dict[str, Any]
) -> None:
    theirs = Theirs(load_target(target_path), save_assistant(tmp_path, kind, **head))
    host = Host(target_path, tmp_path)
    assistant = with_wider_window(tmp_path)

    # The prompt: position P + 1, keys 0 .. P.
    states = host.read(SLOT, 0, PROMPT)
    expected = theirs.draft(PROMPT, 0, newest=42)
    num_valid = len(PROMPT)
    check_equal(ours(assistant, host, states[-1], 42, num_valid, num_valid), expected)

    # A round whose last two drafts were rejected: the first of their keys is still there.
    query = [42, *expected[0]]
    states = host.read(SLOT, num_valid, query)
    expected = theirs.draft([*PROMPT, *query], 2, newest=8)
    num_valid += len(query) - 2
    check_equal(ours(assistant, host, states[-3], 8, num_valid, num_valid + 1), expected)


@pytest.mark.parametrize("num_kv_shared_layers", [0, 2])
def test_the_keys_that_are_read_are_those_that_transformers_hands_over(
    tmp_path: Path, num_kv_shared_layers: int
) -> None:
    path = save_target(tmp_path / "target", num_kv_shared_layers=num_kv_shared_layers)
    save_assistant(tmp_path / "draft")
    shared = run_target(load_target(path), PROMPT).shared_kv_states
    host = Host(path, tmp_path / "draft")
    host.read(SLOT, 0, PROMPT)
    kv = host.kv(SLOT, len(PROMPT))
    for kind, layer in host.speculator.shared_layers.items():
        for mine, theirs in zip(kv[layer.index], shared[kind], strict=True):
            torch.testing.assert_close(mine, theirs[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_the_speculator_stands_at_the_last_position_that_the_target_has_read(
    target_path: Path, tmp_path: Path
) -> None:
    """Position P and keys 0 .. P in `transformers`' assistant give the speculator's logits."""
    prompt = PROMPT[:WINDOW]  # short enough that the wider window shows nothing more
    model = save_assistant(tmp_path)
    target = load_target(target_path)
    outputs = run_target(target, prompt)
    host = Host(target_path, tmp_path)
    batch = prompt_batch(
        [prompt],
        [SLOT],
        [42],
        temperature=host.temperature,
        seeds=host.seeds,
        num_draft_tokens=K,
    )
    batch.hidden_states = host.read(SLOT, 0, prompt)
    drafted = host.propose(batch).tokens[0].tolist()
    by_position = {}
    for position in (len(prompt) - 1, len(prompt)):
        token_ids, state = torch.tensor([[42]]), outputs.hidden_states[-1][:, -1:]
        tokens, logits = [], []
        for _ in range(K):
            embedded = target.get_input_embeddings()(token_ids)
            with torch.no_grad():
                output = model(
                    inputs_embeds=torch.cat([embedded, state], dim=-1),
                    position_ids=torch.tensor([[position]]),
                    shared_kv_states=dict(outputs.shared_kv_states),
                )
            token_ids, state = output.logits.argmax(-1), output.last_hidden_state
            tokens.append(int(token_ids))
            logits.append(output.logits[0, 0])
        by_position[position] = tokens, torch.stack(logits)
    check_equal((drafted, host.logits), by_position[len(prompt) - 1])
    assert (host.logits - by_position[len(prompt)][1]).abs().max() > 1e-2


def load_target(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return model.eval()


def with_wider_window(path: Path) -> Assistant:
    """Our modules, whose sliding layers see one key more."""
    checkpoint = Checkpoint(path)
    config = read_config(checkpoint)
    assistant = load_assistant(checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))
    for layer in assistant.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window += 1
    return assistant
