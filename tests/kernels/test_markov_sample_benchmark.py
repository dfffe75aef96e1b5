"""What a sweep of the benchmark of `markov_sample` times, without a device, and what is timed."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("index", "timed"), [(1, ["step"]), (None, ["first", "step"])])
def test_a_sweep_times_one_launch_or_the_whole_call(monkeypatch, capsys, index, timed):
    """A step that is launched again draws nothing, so `markov_sample` is swept by whole calls."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    timing = importlib.import_module("timing")
    launched, seen = [], []
    constants = SimpleNamespace(ROWS=(16,))
    module = SimpleNamespace(launch=lambda kernel: launched.append(kernel.__name__))

    def run():
        for name in ("first_kernel", "step_kernel"):
            module.launch(SimpleNamespace(__name__=name))

    def launch_us(repeat, repeats):
        launched.clear()
        repeat()
        seen.append((constants.ROWS, [name.removesuffix("_kernel") for name in launched]))
        return 2.0 if constants.ROWS == (16,) else 1.0

    monkeypatch.setattr(timing, "launch_us", launch_us)
    timing.sweep(run, module, index, constants, {"ROWS": ((16,), (32,))})
    assert seen == [((16,), timed), ((32,), timed)]
    assert constants.ROWS == (16,)
    title, fastest, used = capsys.readouterr().out.splitlines()
    assert title == f"  us of {'a call' if index is None else 'step'} by ROWS"
    assert "(32,)" in fastest
    assert used.split()[0] == "(16,)"
    assert used.endswith("(used)")
