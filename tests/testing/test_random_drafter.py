from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from toy_plugins import ToyPlugin, spec

from specreg.errors import ConfigError, PluginError
from specreg.registry import Registry
from specreg.testing import (
    save_kit_target,
    save_random_checkpoint,
    save_random_drafter,
    tiny_subject,
)


def write(directory, target_config):
    width = target_config["hidden_size"]
    save_random_checkpoint(directory, {"width": width}, {"fc.weight": (width, 2 * width)})
    return {"method": "toy", "model": str(directory), "num_speculative_tokens": 2}


def write_nothing(directory, target_config):
    return None


def registry(function: str | None) -> Registry:
    factory = None if function is None else f"{__name__}:{function}"
    toy = spec("toy", needs_checkpoint=True, random_drafter=factory)
    return Registry.from_plugins([ToyPlugin(toy)])


def test_a_random_drafter_has_the_shape_of_the_target(tmp_path):
    target = save_kit_target(tmp_path / "target")
    draft = tmp_path / "new" / "draft"
    speculative = save_random_drafter("toy", draft, str(target), registry("write"))
    assert speculative == {"method": "toy", "model": str(draft), "num_speculative_tokens": 2}
    assert json.loads((draft / "config.json").read_text()) == {"width": 32}
    assert load_file(draft / "model.safetensors")["fc.weight"].shape == (32, 64)


def test_it_is_enough_for_the_conformance_kit(tmp_path):
    subject = tiny_subject("toy", tmp_path, registry("write"))
    assert subject.speculative["model"] == str(tmp_path / "draft")
    assert subject.target == str(tmp_path / "target")


def test_a_speculator_that_makes_none_is_told(tmp_path):
    target = str(save_kit_target(tmp_path / "target"))
    with pytest.raises(ConfigError, match="'toy' makes no random drafters"):
        save_random_drafter("toy", tmp_path, target, registry(None))
    with pytest.raises(ConfigError, match="no speculator 'tiy'"):
        save_random_drafter("tiy", tmp_path, target, registry(None))
    with pytest.raises(PluginError, match="comes without its configuration"):
        save_random_drafter("toy", tmp_path, target, registry("write_nothing"))


def test_weights_depend_on_the_seed_alone_and_none_is_neutral(tmp_path):
    shapes = {"a.weight": (64, 64), "norm.weight": (64,), "fc.bias": (64,)}
    ids = torch.arange(3)
    torch.manual_seed(0)
    first = save_random_checkpoint(tmp_path / "a", {}, shapes, integers={"d2t": ids})
    torch.manual_seed(1)
    again = save_random_checkpoint(tmp_path / "b", {}, dict(reversed(shapes.items())))
    other = save_random_checkpoint(tmp_path / "c", {}, shapes, seed=1)
    loaded = [load_file(path / "model.safetensors") for path in (first, again, other)]
    assert torch.equal(loaded[0]["d2t"], ids)
    for name in shapes:
        assert torch.equal(loaded[0][name], loaded[1][name])
        assert not torch.equal(loaded[0][name], loaded[2][name])
    assert loaded[0]["norm.weight"].mean() == pytest.approx(1.0, abs=0.1)
    assert loaded[0]["fc.bias"].mean() == pytest.approx(0.0, abs=0.1)
    assert loaded[0]["a.weight"].std() == pytest.approx(1.1 / 8, rel=0.1)
