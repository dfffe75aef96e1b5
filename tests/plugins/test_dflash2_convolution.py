"""The convolutions around sublayers against a loop over rows, taps and channels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, Replay
from safetensors.torch import load_file, save_file
from specreg_dflash.convolution.config import ConvolutionConfig
from specreg_dflash.convolution.grouped import GroupedConvolution

HIDDEN = 12


def convolution(taps: int, group: int, dtype: torch.dtype = torch.float32) -> GroupedConvolution:
    made = GroupedConvolution(HIDDEN, ConvolutionConfig(taps, group))
    generator = torch.Generator().manual_seed(taps)
    weights = {
        name: torch.randn(value.shape, generator=generator).to(dtype)
        for name, value in made.state_dict().items()
    }
    made.load_state_dict(weights, assign=True)
    return made.requires_grad_(False)


@pytest.mark.parametrize(("taps", "group"), [(1, 12), (2, 4), (3, 1), (4, 3)])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_row_sums_itself_and_the_rows_before_it_in_its_block(
    num_rows: int, taps: int, group: int
) -> None:
    made = convolution(taps, group)
    num_blocks = 3
    normed, x = torch.randn(2, num_blocks * num_rows, HIDDEN)
    kernels = made.kernels(normed)
    change = normed @ made.kernel_projection.weight.T  # order of the rows: side, tap, group
    change = change.view(-1, 2, taps, HIDDEN // group)
    for side, kernel in enumerate(kernels):
        got = made.convolve(x, kernel, num_rows)
        for row in range(len(x)):
            expected = torch.zeros(HIDDEN)
            for tap in range(min(taps, row % num_rows + 1)):
                for channel in range(HIDDEN):
                    base = made.base_kernel[side, tap, channel]
                    weight = base + change[row, side, tap, channel // group]
                    expected[channel] += weight * x[row - tap, channel]
            torch.testing.assert_close(got[row], expected, atol=1e-5, rtol=1e-5)


def test_nothing_of_another_block_or_of_a_later_row_is_read() -> None:
    made = convolution(3, 4)
    normed, x = torch.randn(2, 8, HIDDEN)
    kernel, _ = made.kernels(normed)
    before = made.convolve(x, kernel, 4)
    changed = x.clone()
    changed[2:4] = torch.nan
    after = made.convolve(changed, kernel, 4)
    assert torch.equal(after[:2], before[:2])
    assert after[2:4].isnan().all()
    assert torch.equal(after[4:], before[4:])


def test_kernels_are_kept_a_group_and_not_a_channel() -> None:
    """A pass over thousands of rows would hold `2 * taps` times their states in fp32 otherwise."""
    made = convolution(2, 4, torch.bfloat16)
    for kernel in made.kernels(torch.randn(6, HIDDEN).bfloat16()):
        assert kernel.change.shape == (6, 2, HIDDEN // 4)
        assert kernel.base.untyped_storage().data_ptr() == made.base_kernel.data_ptr()


def test_sums_are_fp32_and_the_result_is_in_the_input_dtype() -> None:
    made = convolution(2, 4, torch.bfloat16)
    normed, x = torch.randn(2, 6, HIDDEN).bfloat16()
    _, kernel = made.kernels(normed)
    got = made.convolve(x, kernel, 3)
    assert torch.equal(got, made.convolve(x.float(), kernel, 3).bfloat16())


def test_with_identities_and_empty_tables_it_drafts_as_dflash_does(tmp_path: Path) -> None:
    case = GoldenCase("dflash-1")
    directory = case.checkpoint("checkpoint_hf", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    identity = torch.zeros(2, 3, hidden)
    identity[:, 0] = 1.0
    for index in range(config["num_hidden_layers"]):
        for sublayer in ("attention", "mlp"):
            name = f"layers.{index}.{sublayer}_conv"
            tensors[f"{name}.base_kernel"] = identity.clone()
            tensors[f"{name}.kernel_projection.weight"] = torch.zeros(2 * 3 * 4, hidden)
    for side in ("predecessor", "successor"):
        tensors[f"candidate_selector.{side}_codebook"] = torch.zeros(vocab_size, 2)
    tensors["candidate_selector.hidden_projection.weight"] = torch.randn(2, hidden)
    save_file(tensors, directory / "model.safetensors")
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "conv_kernel_size": 3,
        "conv_group_size": hidden // 4,
        "selector_rank": 2,
        "selector_top_k": 3,
    }
    (directory / "config.json").write_text(json.dumps(config))
    replay = Replay(case, {"method": "dflash", "model": str(directory)}, tmp_path)
    for index, proposed in replay.rounds():
        assert proposed.tokens == case.tensor(index, "draft_tokens").tolist()
        assert proposed.ids is not None
        best = case.tensor(index, "draft_logits").gather(-1, proposed.ids)
        torch.testing.assert_close(proposed.logits, best, atol=1e-4, rtol=1e-4)
