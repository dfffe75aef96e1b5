"""Gemma 4 assistants against explicit cross-attention over the target's keys and values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma4_host import MAX_MODEL_LEN, SLOT, Host, K, explicit_draft
from safetensors.torch import load_file, save_file
from specreg_mtp.gemma4_random import random_drafter, save_random_assistant
from torch import Tensor

from specreg.capabilities import HiddenStates
from specreg.config import EngineConfig
from specreg.model_config import read_model_config
from specreg.registry import get_registry
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams
from specreg.speculator import ProposeInputs
from specreg.testing.batches import decode_batch, prompt_batch, with_padding
from specreg.testing.tiny_models import save_tiny_model

PROMPT = [5, 61, 17, 33, 80, 4, 29, 71, 12, 55]
WINDOW = 7
SLIDING_LAYER, FULL_LAYER = 2, 3
NEWEST = 42


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("gemma4", tmp_path_factory.mktemp("gemma4") / "target")


@pytest.fixture(scope="session")
def target_config(target_path: Path) -> dict[str, Any]:
    return dict(read_model_config(str(target_path)) or {})


@pytest.fixture(scope="session")
def draft_path(target_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_assistant(tmp_path_factory.mktemp("gemma4") / "draft", target_config)


@pytest.fixture
def host(target_path: Path, draft_path: Path) -> Host:
    return Host(target_path, draft_path)


def prompted(host: Host, states: Tensor, prompt: list[int] = PROMPT) -> ProposeInputs:
    """The batch after `prompt` was read in one step and `NEWEST` sampled behind it."""
    batch = prompt_batch(
        [prompt],
        [SLOT],
        [NEWEST],
        temperature=host.temperature,
        seeds=host.seeds,
        num_draft_tokens=K,
    )
    batch.hidden_states = states
    return batch


def verified(host: Host, drafts: list[int], num_rejected: int, newest: int) -> ProposeInputs:
    """The batch after the target has read `NEWEST` and drafts behind the prompt."""
    query = [NEWEST, *drafts]
    states = host.read(SLOT, len(PROMPT), query).clone()
    states[len(query) - num_rejected :] = 1e4  # nothing may depend on rejected rows
    batch = decode_batch(
        [query],
        [len(PROMPT)],
        [SLOT],
        [num_rejected],
        [newest],
        temperature=host.temperature,
        seeds=host.seeds,
        num_draft_tokens=K,
    )
    batch.hidden_states = states
    return batch


def without_centroids(source: Path, directory: Path) -> Path:
    """The same assistant with a dense head."""
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    kept = {name: w for name, w in weights.items() if not name.startswith("masked_embedding")}
    save_file(kept, directory / "model.safetensors")
    config = dict(read_model_config(str(directory)) or {}, use_ordered_embeddings=False)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def seen(host: Host, position: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What a query at `position` may see of the layers that the assistant reads."""
    kv = host.kv(SLOT, position + 1)
    sliding = tuple(part[-WINDOW:] for part in kv[SLIDING_LAYER])
    return {"full_attention": kv[FULL_LAYER], "sliding_attention": (sliding[0], sliding[1])}


def test_a_fresh_prompt_is_drafted_for_at_its_last_position(host: Host, draft_path: Path) -> None:
    states = host.read(SLOT, 0, PROMPT)
    output = host.propose(prompted(host, states))
    last = len(PROMPT) - 1
    tokens, logits = explicit_draft(
        draft_path, host.target, NEWEST, states[last], last, seen(host, last)
    )
    assert output.tokens[0].tolist() == tokens
    torch.testing.assert_close(host.logits, logits, rtol=1e-4, atol=1e-4)
    assert [host.sampler.positions[step] for step in range(K)] == [last + 2 + s for s in range(K)]


@pytest.mark.parametrize("num_rejected", range(K + 1))
def test_after_verification_the_last_accepted_row_alone_counts(
    host: Host, draft_path: Path, num_rejected: int
) -> None:
    host.read(SLOT, 0, PROMPT)
    batch = verified(host, [9, 8, 7], num_rejected, newest=66)
    output = host.propose(batch)
    last = len(PROMPT) + K - num_rejected
    assert batch.hidden_states is not None
    state = batch.hidden_states[K - num_rejected]
    tokens, logits = explicit_draft(draft_path, host.target, 66, state, last, seen(host, last))
    assert output.tokens[0].tolist() == tokens
    torch.testing.assert_close(host.logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["position", "length", "window"])
def test_another_position_length_or_window_gives_other_logits(
    host: Host, draft_path: Path, wrong: str
) -> None:
    host.read(SLOT, 0, PROMPT)
    batch = verified(host, [9, 8, 7], 2, newest=66)
    host.propose(batch)
    last = len(PROMPT) + 1
    kv = seen(host, last + (wrong == "length"))
    if wrong == "window":
        kv["sliding_attention"] = host.kv(SLOT, last + 1)[SLIDING_LAYER]
    assert batch.hidden_states is not None
    _, logits = explicit_draft(
        draft_path, host.target, 66, batch.hidden_states[1], last + (wrong == "position"), kv
    )
    assert (host.logits - logits).abs().max() > 1e-2


def test_what_lies_behind_the_last_valid_row_is_never_seen_and_nothing_is_written(
    host: Host,
) -> None:
    host.read(SLOT, 0, PROMPT)
    batch = verified(host, [9, 8, 7], 2, newest=66)
    first = host.propose(batch).tokens.clone()
    logits = host.logits
    valid = len(PROMPT) + 2
    generator = torch.Generator().manual_seed(3)
    for pool in (*host.pool.keys, *host.pool.values):
        for position in range(valid, MAX_MODEL_LEN):
            block = host.pool.block_table[SLOT, position // host.pool.block_size]
            cell = pool[block, position % host.pool.block_size]
            cell.copy_(100 * torch.randn(cell.shape, generator=generator))
    before = [pool.clone() for pool in (*host.pool.keys, *host.pool.values)]
    second = host.propose(batch).tokens
    assert torch.equal(first, second)
    assert torch.equal(logits, host.logits)
    after = (*host.pool.keys, *host.pool.values)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_chunk_of_a_prompt_leaves_nothing_behind(host: Host) -> None:
    whole = host.propose(prompted(host, host.read(SLOT, 0, PROMPT))).tokens.clone()
    keys = {"temperature": host.temperature, "seeds": host.seeds, "num_draft_tokens": K}
    chunk = prompt_batch([PROMPT[:6]], [SLOT], [-1], **keys)
    chunk.hidden_states = host.read(SLOT, 0, PROMPT[:6])
    assert host.propose(chunk).tokens.tolist() == [[-1] * K]
    rest = prompt_batch([PROMPT[6:]], [SLOT], [NEWEST], starts=[6], **keys)
    rest.hidden_states = host.read(SLOT, 6, PROMPT[6:])
    assert torch.equal(host.propose(rest).tokens, whole)


def test_padding_rows_are_inert(host: Host) -> None:
    batch = prompted(host, host.read(SLOT, 0, PROMPT))
    alone = host.propose(batch).tokens.clone()
    states = batch.hidden_states
    assert states is not None
    padded, own = with_padding(batch, [0, 1])
    noise = torch.full((padded.num_tokens, states.shape[1]), float("nan"))
    noise[1 : 1 + len(states)] = states
    padded.hidden_states = noise
    tokens = host.propose(padded).tokens
    assert torch.equal(tokens[own], alone)
    assert (tokens[[row for row in range(len(tokens)) if row not in own]] == -1).all()


def test_a_drafter_of_fewer_positions_stops_at_its_last(
    target_path: Path, draft_path: Path
) -> None:
    host = Host(target_path, draft_path, {"max_model_len": len(PROMPT)})
    states = host.read(SLOT, 0, [*PROMPT, 3])
    assert (host.propose(prompted(host, states[:-1])).tokens >= 0).all()
    longer = prompted(host, states, [*PROMPT, 3])
    assert host.propose(longer).tokens.tolist() == [[-1] * K]


def test_an_ordered_head_over_all_centroids_is_the_dense_head(
    target_path: Path, target_config: dict[str, Any], tmp_path: Path
) -> None:
    ordered = save_random_assistant(
        tmp_path / "ordered", target_config, num_centroids=101, top_k=101
    )
    dense = without_centroids(ordered, tmp_path / "dense")
    logits = []
    for path in (ordered, dense):
        host = Host(target_path, path)
        host.propose(prompted(host, host.read(SLOT, 0, PROMPT)))
        logits.append(host.logits)
    torch.testing.assert_close(*logits)


def test_an_ordered_head_scores_the_tokens_of_the_nearest_centroids_and_no_others(
    target_path: Path, tmp_path: Path
) -> None:
    path = save_tiny_model("gemma4", tmp_path / "target", vocab_size=100)
    config = read_model_config(str(path)) or {}
    draft = save_random_assistant(tmp_path / "draft", config, num_centroids=20, top_k=3)
    host = Host(path, draft)
    host.propose(prompted(host, host.read(SLOT, 0, PROMPT)))
    assistant = host.speculator.assistant
    assert assistant is not None
    ordering = assistant.masked_embedding.token_ordering.view(20, 5)
    for row in host.logits:
        scored = row.isfinite().nonzero().flatten().tolist()
        groups = [set(group) for group in ordering.tolist() if set(group) & set(scored)]
        assert len(scored) == 15
        assert len(groups) == 3
        assert set().union(*groups) == set(scored)


def test_suppressed_tokens_are_never_drafted_and_logits_are_capped(
    target_path: Path, target_config: dict[str, Any], tmp_path: Path
) -> None:
    plain = save_random_assistant(tmp_path / "plain", target_config)
    capped = save_random_assistant(tmp_path / "capped", target_config, final_logit_softcapping=0.5)
    free = Host(target_path, plain)
    favourite = int(free.propose(prompted(free, free.read(SLOT, 0, PROMPT))).tokens[0, 0])
    (capped / "generation_config.json").write_text(f'{{"suppress_tokens": [0, {favourite}]}}')
    host = Host(target_path, capped)
    drafted = host.propose(prompted(host, host.read(SLOT, 0, PROMPT))).tokens
    expected = 0.5 * torch.tanh(free.logits[0] / 0.5)
    expected[[0, favourite]] = -torch.inf
    torch.testing.assert_close(host.logits[0], expected)
    assert favourite not in drafted[0].tolist()


def test_layers_that_share_keys_are_passed_over(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    path = save_tiny_model("gemma4", tmp_path / "target", num_kv_shared_layers=2, layer_types=types)
    config = read_model_config(str(path)) or {}
    speculative = random_drafter(tmp_path / "draft", config)
    selection = get_registry().select(
        EngineConfig.parse({"speculative": speculative}).speculative,  # type: ignore[arg-type]
        read_model_config(str(tmp_path / "draft")),
        config,
    )
    needs = selection.spec.needs_for(selection.setup)
    assert needs.target_kv_layers == (0, 1)
    assert needs.hidden_states is HiddenStates.POST_NORM
    assert needs.kv_specs == ()
    assert needs.prefill_lookahead == 0
    host = Host(path, tmp_path / "draft")
    states = host.read(SLOT, 0, PROMPT)
    host.propose(prompted(host, states))
    kv, last = host.kv(SLOT, len(PROMPT)), len(PROMPT) - 1
    sliding = (kv[0][0][-WINDOW:], kv[0][1][-WINDOW:])
    _, logits = explicit_draft(
        tmp_path / "draft",
        host.target,
        NEWEST,
        states[last],
        last,
        {"full_attention": kv[1], "sliding_attention": sliding},
    )
    torch.testing.assert_close(host.logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
def test_greedy_output_is_the_targets_own(target_path: Path, draft_path: Path, tp: int) -> None:
    config = {"target": str(target_path), "max_model_len": 64, "max_num_batched_tokens": 8}
    ranks = {"tensor_parallel_size": tp, "enable_batch_sharded_sampling": tp > 1}
    speculative = {
        "method": "gemma4_mtp",
        "model": str(draft_path),
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = []
    for extra in ({}, {"speculative": speculative, **ranks}):
        with Engine.from_config(EngineConfig.parse({**config, **extra})) as engine:
            outputs.append(engine.generate(["a prompt", "another, longer one"], params))
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
    assert outputs[1].stats.num_drafts > 0
