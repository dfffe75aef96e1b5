from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specreg.checkpoint import Checkpoint
from specreg.errors import CheckpointError
from specreg.weights import Ignored, load_weights, module_bytes


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2, bias=False, device="meta")
        self.lm_head = nn.Linear(2, 3, bias=False, device="meta")
        self.register_buffer("d2t", torch.empty(3, dtype=torch.int64, device="meta"))


FULL = {
    "fc.weight": torch.randn(2, 4),
    "lm_head.weight": torch.randn(3, 2),
    "d2t": torch.arange(3),
}


def checkpoint(folder, tensors) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return Checkpoint(folder)


def load(folder, tensors, rename=str, **keys) -> Head:
    head = Head()
    keys = {"dtype": torch.bfloat16, "device": "cpu"} | keys
    load_weights(head, checkpoint(folder, tensors), rename, **keys)
    return head


def test_tensors_land_under_their_new_names_in_the_wanted_dtype(tmp_path):
    old = {f"model.{name}": tensor for name, tensor in FULL.items()}
    head = load(tmp_path, old, lambda name: name.removeprefix("model."))
    assert torch.equal(head.fc.weight, FULL["fc.weight"].bfloat16())
    assert head.d2t.dtype == torch.int64
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert module_bytes(head) == 2 * (8 + 6) + 8 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_ids_that_are_no_integers_are_refused(tmp_path, dtype):
    message = f"no integers where ids belong.*'d2t' in {dtype}"
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load(tmp_path, {**FULL, "d2t": FULL["d2t"].to(dtype)})


def test_single_parameters_are_kept_in_a_dtype_of_their_own(tmp_path):
    head = load(tmp_path, FULL, dtypes={"fc.weight": torch.float32})
    assert torch.equal(head.fc.weight, FULL["fc.weight"])
    assert head.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_tensor_is_refused(tmp_path, dtype):
    quantised = {**FULL, "lm_head.weight": FULL["lm_head.weight"].to(dtype)}
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' in torch"):
        load(tmp_path, quantised)


def test_a_parameter_that_may_be_absent_stays_without_memory(tmp_path):
    tensors = {name: FULL[name] for name in ("fc.weight", "d2t")}
    head = load(tmp_path, tensors, absent={"lm_head.weight": "shared with the target"})
    assert head.lm_head.weight.is_meta
    assert module_bytes(head) == 2 * 8 + 8 * 3


def test_tensors_of_others_and_ignored_ones_are_passed_over(tmp_path):
    def rename(name):
        if name == "t2d":
            return Ignored("the inverse of d2t")
        return None if name.startswith("target.") else name

    extra = {"t2d": torch.ones(5), "target.fc.weight": torch.ones(1)}
    load(tmp_path, FULL | extra, rename)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.bias": torch.ones(2)}, r"no place in the drafter[\s\S]*'fc\.bias'.*\[2\]"),
        ({"fc.weight_scale": torch.ones(1)}, r"no place in the drafter[\s\S]*'fc\.weight_scale'"),
        ({"fc.weight": torch.ones(2, 3)}, r"another shape[\s\S]*\[2, 3\]; allowed: \[2, 4\]"),
        ({"model.d2t": torch.arange(3)}, r"two tensors[\s\S]*'model\.d2t'"),
        ({"lm_head.weight": None}, r"does not fill[\s\S]*lm_head\.weight \[3, 2\]"),
    ],
)
def test_nothing_is_dropped_and_nothing_left_random(tmp_path, change, message):
    tensors = {name: t for name, t in (FULL | change).items() if t is not None}
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors, lambda name: name.removeprefix("model."))
