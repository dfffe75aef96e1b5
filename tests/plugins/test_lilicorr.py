"""LiLiCorr's lattice: another way to write it, short proposals, and whose context an anchor has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_cases import GoldenCase, Replay
from safetensors.torch import load_file, save_file
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.lilicorr.config import LiLiCorrConfig, read_lilicorr
from specreg_dflash.lilicorr.head import LiLiCorrHead
from torch import Tensor

from specreg.model_config import read_model_config
from specreg.testing.batches import decode_batch, prompt_batch

CASE, FORM = GoldenCase("lilicorr-1"), "checkpoint_hf"
HIDDEN, NUM_REQS = 64, 3


def read(**section: Any) -> LiLiCorrConfig:
    config = dict(read_model_config(str(CASE.folder / FORM)) or {})
    config["dflash_config"] = {**config["dflash_config"], **section}
    return read_lilicorr(ConfigForm.of(config))


def random_head(num_steps: int, **section: Any) -> LiLiCorrHead:
    head = LiLiCorrHead(read(**section))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in head.state_dict().items()
    }
    head.load_state_dict(weights, assign=True)
    head.requires_grad_(False)
    head.fold(num_steps)
    return head


def random_inputs(num_steps: int, num_candidates: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_steps)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    log_probs = random(NUM_REQS, num_steps, num_candidates).sort(dim=-1, descending=True).values - 3
    return [
        random(NUM_REQS, num_steps, HIDDEN),
        random(NUM_REQS, num_steps, num_candidates, HIDDEN),
        log_probs,
        random(NUM_REQS, HIDDEN),
        torch.tensor([True, False, True]),
    ]


def linear(head: LiLiCorrHead, name: str, x: Tensor) -> Tensor:
    weights = head.state_dict()
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def rms(head: LiLiCorrHead, name: str, x: Tensor) -> Tensor:
    scale = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return head.state_dict()[f"{name}.weight"] * x * scale


def dense_edges(
    head: LiLiCorrHead,
    hidden: Tensor,
    embedded: Tensor,
    log_probs: Tensor,
    context: Tensor,
    has_context: bool,
) -> Tensor:
    """Scores of one request in float64: explicit loops, and the split form of the factors."""
    config = head.config
    num_steps, num_candidates = log_probs.shape
    width, num_heads = config.hidden_size, config.num_heads
    weights = head.state_dict()
    states = []
    for slot in range(num_steps):
        for rank in range(num_candidates):
            lp = log_probs[slot, rank]
            share = rank / (num_candidates - 1) if num_candidates > 1 else 0.0
            rest = [lp - log_probs[slot].max(), torch.tensor(share), torch.tensor(float(rank == 0))]
            features = torch.stack([lp, lp.exp(), *[value.double() for value in rest]])
            normed = F.layer_norm(
                features, (5,), weights["feature_norm.weight"], weights["feature_norm.bias"], 1e-5
            )
            up = linear(head, "feature_mlp.up_proj", normed)
            state = linear(head, "feature_mlp.down_proj", F.silu(up))
            state = state + linear(head, "pass_hidden_proj", hidden[slot])
            token = embedded[slot, rank]
            state = state + (linear(head, "token_proj", token) if width != HIDDEN else token)
            state = state + weights["slot_embedding"][0, 0, slot, 0]
            states.append(state + weights["rank_embedding"][0, 0, 0, rank])
    x = torch.stack(states)
    slots = [index // num_candidates for index in range(len(x))]
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        packed = rms(head, f"{layer}.attn_norm", x) @ weights[f"{layer}.attn.in_proj_weight"].T
        packed = packed + weights[f"{layer}.attn.in_proj_bias"]
        query, key, value = packed.chunk(3, dim=-1)
        outs = []
        for part in range(num_heads):
            at = slice(part * width // num_heads, (part + 1) * width // num_heads)
            scores = query[:, at] @ key[:, at].T / (width / num_heads) ** 0.5
            for i, j in ((i, j) for i in range(len(x)) for j in range(len(x))):
                offset = slots[i] - slots[j] + head.block_size - 1
                scores[i, j] += weights["relative_slot_bias"][part, offset]
                scores[i, j] += weights["same_slot_bias"][part] * (slots[i] == slots[j])
            outs.append(scores.softmax(-1) @ value[:, at])
        x = x + linear(head, f"{layer}.attn.out_proj", torch.cat(outs, dim=-1))
        up = linear(head, f"{layer}.mlp.up_proj", rms(head, f"{layer}.mlp_norm", x))
        x = x + linear(head, f"{layer}.mlp.down_proj", F.silu(up))
    x = rms(head, "output_norm", x)
    projected = linear(head, "context_proj", context) * float(has_context)
    anchor = rms(head, "anchor_norm", projected)
    of_x, of_anchor, of_both = weights["factor_input_proj.weight"].chunk(3, dim=1)
    z = x @ of_x.T + of_anchor @ anchor + (x * anchor) @ of_both.T
    z = F.silu(z + weights["factor_input_proj.bias"])
    unit = {
        name: linear(head, name, source)
        for name, source in (("out_head", z), ("in_head", z), ("anchor_out_head", anchor))
    }
    for name, vectors in unit.items():
        unit[name] = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=config.vector_eps)
    edges = torch.empty(num_steps, num_candidates, num_candidates, dtype=torch.float64)
    for slot in range(num_steps):
        for before in range(num_candidates):
            for after in range(num_candidates):
                entering = unit["in_head"][slot * num_candidates + after]
                leaving = unit["anchor_out_head"]
                if slot:
                    leaving = unit["out_head"][(slot - 1) * num_candidates + before]
                edges[slot, before, after] = config.logit_scale * (leaving @ entering)
    return edges


@pytest.mark.parametrize(
    ("num_steps", "section"),
    [
        (5, {}),
        (3, {}),
        (1, {}),
        (2, {"lilicorr_candidate_topk": 1}),
        (2, {"lilicorr_hidden_size": 0, "lilicorr_candidate_topk": 2, "lilicorr_num_heads": 4}),
    ],
)
def test_it_equals_a_loop_over_slots_ranks_and_pairs(
    num_steps: int, section: dict[str, Any]
) -> None:
    head = random_head(num_steps, **section)
    inputs = random_inputs(num_steps, head.num_candidates)
    edges = head(*inputs)
    assert edges.dtype == torch.float32
    assert edges.abs().max() <= head.config.logit_scale + 1e-4
    assert torch.equal(edges[:, 0], edges[:, 0, :1].expand_as(edges[:, 0]))
    wide = head.double()
    for request in range(NUM_REQS):
        *tensors, has_context = (tensor[request] for tensor in inputs)
        expected = dense_edges(wide, *(t.double() for t in tensors), bool(has_context))
        torch.testing.assert_close(edges[request].double(), expected, atol=1e-4, rtol=1e-4)


def test_later_slots_change_the_scores_of_earlier_ones() -> None:
    inputs = random_inputs(5, 4)
    whole = random_head(5)(*inputs)
    short = [tensor[:, :3] for tensor in inputs[:3]]
    assert not torch.allclose(random_head(3)(*short, *inputs[3:])[:, 0], whole[:, 0], atol=1e-3)
    changed = [tensor.clone() for tensor in inputs]
    changed[0][:, 4] += 1.0
    assert not torch.allclose(random_head(5)(*changed)[:, 0], whole[:, 0], atol=1e-4)


def test_without_context_nothing_of_it_is_read_and_scores_are_finite() -> None:
    head = random_head(4)
    inputs = random_inputs(4, 4)
    before = head(*inputs)
    inputs[3][1] = torch.nan
    after = head(*inputs)
    assert torch.equal(before, after)
    assert after.isfinite().all()
    inputs[3][0] += 1.0
    assert not torch.allclose(head(*inputs)[0], before[0], atol=1e-3)


def replay(folder: Path, **speculative: Any) -> Replay:
    return Replay(CASE, {"method": "dflash", **speculative}, folder, form=FORM)


def prepared(speculator: Any, batch: Any) -> Tensor:
    """What the context states of a batch are, after preparing it."""
    generator = torch.Generator().manual_seed(0)
    batch.aux_hidden_states = torch.randn(batch.num_tokens, 2 * HIDDEN, generator=generator)
    speculator.prepare(batch)
    context: Tensor = speculator.backbone.context(batch.aux_hidden_states)
    return context


def test_an_anchor_has_the_context_of_the_token_before_it(tmp_path: Path) -> None:
    made = replay(tmp_path)
    speculator: Any = made.speculator
    common: dict[str, Any] = {
        "temperature": made.temperature,
        "seeds": made.seeds,
        "num_draft_tokens": 4,
    }
    rows = decode_batch([[1, 2, 3], [4, 5, 6, 7]], [5, 9], [2, 0], [1, 3], [8, 9], **common)
    context = prepared(speculator, rows)
    contexts, has_context = speculator._contexts, speculator._has_context
    assert torch.equal(contexts[:2], context[[1, 3]])
    assert has_context[:2].tolist() == [True, True]

    rows.num_rejected[1] = 4  # not one row stays
    context = prepared(speculator, rows)
    assert torch.equal(contexts[0], context[1])
    assert has_context[:2].tolist() == [True, False]

    rows = prompt_batch([[1, 2, 3], [4, 5]], [-1, 1], [-1, 8], **common)
    context = prepared(speculator, rows)
    assert torch.equal(contexts[1], context[4])
    assert has_context[:2].tolist() == [False, True]


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
def test_proposals_of_any_length_below_the_block_are_drawn_from_candidates(
    num_drafts: int, tmp_path: Path
) -> None:
    for _, proposed in replay(tmp_path, num_speculative_tokens=num_drafts).rounds():
        assert proposed.ids is not None
        assert proposed.ids.shape == (num_drafts, 4)
        best = proposed.ids.gather(1, proposed.logits.argmax(-1, keepdim=True))
        assert proposed.tokens == best.squeeze(1).tolist()


def test_candidates_are_embedded_by_the_target_whatever_the_drafter_embeds_with(
    tmp_path: Path,
) -> None:
    directory = CASE.checkpoint(FORM, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {**tensors, "embed_tokens.weight": torch.randn(160, HIDDEN)},
        directory / "model.safetensors",
    )
    made = replay(tmp_path, model=str(directory))
    speculator: Any = made.speculator
    calls: list[tuple[Any, ...]] = []
    speculator.lattice.register_forward_hook(lambda _m, inputs, _out: calls.append(inputs))
    assert not speculator.backbone.ends.shares_embedding
    _, proposed = next(made.rounds())
    assert torch.equal(calls[-1][1][0], speculator._target.embed(proposed.ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_candidates_of_probability_zero_are_never_drafted_and_spoil_no_other(
    dtype: torch.dtype,
) -> None:
    head = random_head(3).to(dtype)
    head.fold(3)
    num_candidates = head.num_candidates
    hidden, embedded, log_probs, context, has_context = random_inputs(3, num_candidates)
    log_probs[:, :, -1] = -torch.inf
    states = [x.to(dtype) for x in (hidden, embedded)]
    edges = head(*states, log_probs, context.to(dtype), has_context)
    assert edges.dtype == torch.float32
    assert torch.equal(edges.isneginf(), log_probs.isneginf()[:, :, None].expand_as(edges))
    assert edges[..., :-1].isfinite().all()
    log_probs[0] = torch.nan
    edges = head(*states, log_probs, context.to(dtype), has_context)
    assert edges[0].isnan().all()
    assert edges[1:, ..., :-1].isfinite().all()
