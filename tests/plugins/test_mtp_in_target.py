"""MTP modules that lie in the target's own checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_families import FAMILIES
from mtp_harness import HIDDEN_SIZE
from safetensors.torch import load_file, save_file

from specreg.config import EngineConfig
from specreg.errors import CheckpointError
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams
from specreg.testing import save_kit_target

PROMPTS = [[3, 4, 5, 6, 3, 4], [7], list(range(2, 16))]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def target_with(name: str, directory: Path, **config: Any) -> Path:
    """The kit's target, with the modules of a family beside its own tensors."""
    target = save_kit_target(directory / "target")
    weights = load_file(target / "model.safetensors")
    weights |= FAMILIES[name].save(directory / "modules")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


def run(target: Path, **speculative: Any) -> tuple[list[list[int]], Any]:
    config: dict[str, Any] = {"target": str(target), "max_model_len": 64, "max_num_seqs": 2}
    if speculative:
        config["speculative"] = speculative
    with Engine.from_config(EngineConfig.parse({**config, "num_kv_blocks": 32})) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        return [output.token_ids for output in outputs], outputs.stats


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("a plain target", {}),
        ("deepseek", {"num_nextn_predict_layers": 3}),
        ("deepseek", {"num_nextn_predict_layers": 1}),
    ],
)
def test_modules_of_a_target_draft_for_it(
    name: str, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = target_with(name, tmp_path, **config)
    expected, _ = run(target)
    assert "tensors that nothing reads" in caplog.text  # without a speculator nothing does
    caplog.clear()
    tokens, stats = run(target, method="mtp", num_speculative_tokens=3)
    assert tokens == expected
    assert stats.num_draft_tokens > 0
    assert "tensors that nothing reads" not in caplog.text
    assert "LOAD REPORT" not in caplog.text


def test_a_head_that_is_a_copy_of_the_targets_takes_no_memory(tmp_path: Path) -> None:
    target = target_with("deepseek", tmp_path, num_nextn_predict_layers=3)
    path = target / "model.safetensors"
    weights = load_file(path)
    for layer in (2, 4):
        weights[f"model.layers.{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[f"model.layers.{layer}.embed_tokens.weight"] = torch.zeros(17, HIDDEN_SIZE)
    save_file(weights, path, metadata={"format": "pt"})
    config = {"method": "mtp", "num_speculative_tokens": 3}
    settings = {"target": str(target), "max_model_len": 64, "num_kv_blocks": 8}
    with Engine.from_config(EngineConfig.parse({**settings, "speculative": config})) as engine:
        drafter = engine.models.drafting.speculator.drafter  # type: ignore[union-attr]
        assert [step.has_own_head for step in drafter.steps] == [False, True, False]
        assert drafter.ends.shares_embedding


def test_a_target_without_the_modules_that_it_declares_is_named(tmp_path: Path) -> None:
    target = save_kit_target(tmp_path)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(CheckpointError, match="target's checkpoint holds no MTP modules") as caught:
        run(target, method="mtp", num_speculative_tokens=2)
    assert "mtp.fc.weight or" in str(caught.value)
    assert "'model'" in str(caught.value)


def test_what_neither_reads_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = target_with("a plain target", tmp_path)
    path = target / "model.safetensors"
    save_file(load_file(path) | {"stray.weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    run(target, method="mtp", num_speculative_tokens=2)
    assert f"{target}: tensors that nothing reads: stray.weight" in caplog.messages
