"""What a plugin's own code raises while it is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from toy_plugins import ToyPlugin, spec

from specreg.config import EngineConfig
from specreg.errors import CheckpointError, PluginError
from specreg.registry import Registry
from specreg.runtime.loading import load_models
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.speculator import SpeculatorBase
from specreg.testing import save_kit_target


class Careless(SpeculatorBase):
    def load_model(self, target: Any) -> None:
        raise KeyError("fc.weight")


class Careful(SpeculatorBase):
    def load_model(self, target: Any) -> None:
        raise CheckpointError("no fc", where="draft", got="nothing", fix="another")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (
            Careless,
            PluginError,
            r"'toy' could not be loaded[\s\S]*of toy-dist[\s\S]*KeyError: 'fc.weight'",
        ),
        (Careful, CheckpointError, "no fc"),
    ],
)
def test_is_told_with_the_plugins_name_unless_it_is_an_error_of_the_tree(
    kind, error, message, tmp_path
):
    toy = spec("toy", factory=f"{__name__}:{kind.__name__}")
    target = save_kit_target(tmp_path)
    config = EngineConfig.parse(
        {"target": str(target), "speculative": {"method": "toy", "num_speculative_tokens": 2}}
    )
    with pytest.raises(error, match=message):
        load_models(config, TensorParallel(), registry=Registry.from_plugins([ToyPlugin(toy)]))
