"""Launches through a compiled kernel: what distinguishes them, and what they are given."""

import torch

from specreg.kernels.common import launch as module
from specreg.kernels.common.launch import launch, specialisation


class Compiled:
    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("compiled", grid, arguments))


class Kernel:
    """A kernel as Triton's: launching it compiles it."""

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def run(*arguments, num_warps):
            self.log.append(("kernel", grid, arguments, num_warps))
            return Compiled(self.log)

        return run


def test_a_kernel_is_specialised_once_for_each_key_and_number_of_warps(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    kernel = Kernel()
    for key, num_warps in (("a", 4), ("a", 4), ("b", 4), ("a", 2), ("a", 4)):
        launch(kernel, (7,), (1, None), key, num_warps)
    assert [entry[0] for entry in kernel.log] == [
        "kernel",
        "compiled",
        "kernel",
        "kernel",
        "compiled",
    ]
    assert kernel.log[1] == ("compiled", (7, 1, 1), (1, None))


def test_two_kernels_never_share_what_was_compiled(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    first, second = Kernel(), Kernel()
    for kernel in (first, second, first, second):
        launch(kernel, (1, 2), (), "key", 4)
    assert [entry[0] for entry in first.log] == ["kernel", "compiled"]
    assert [entry[0] for entry in second.log] == ["kernel", "compiled"]


def test_dtypes_alignments_values_and_absent_arguments_tell_launches_apart():
    values = torch.zeros(64)
    keys = [
        specialisation(values, 3),
        specialisation(values, 4),
        specialisation(values[1:], 3),
        specialisation(values.half(), 3),
        specialisation(None, 3),
        specialisation((values, 3)),
        specialisation((values,), 3),
    ]
    assert len(set(keys)) == len(keys)
    assert specialisation(values, 3) == specialisation(values[4:], 3) == specialisation(values, 3)
