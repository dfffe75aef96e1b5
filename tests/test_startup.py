from __future__ import annotations

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "safetensors", "numpy")
LIGHT = (
    "specreg",
    "specreg.errors",
    "specreg.ownership",
    "specreg.capabilities",
    "specreg.config",
    "specreg.memory",
    "specreg.plugin",
    "specreg.registry",
    "specreg.policy",
    "specreg.cli",
    "specreg.runtime.models",
)


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("module", LIGHT)
def test_importing_the_light_modules_brings_no_framework(module):
    found = run(f"import sys, {module}; print([n for n in {HEAVY} if n in sys.modules])")
    assert found.stdout.strip() == "[]"


def test_listing_plugins_and_resolving_a_plan_bring_no_framework():
    source = f"""
import sys
from specreg.config import EngineConfig
from specreg.policy import resolve
from specreg.registry import get_registry
assert len(get_registry().speculators) > 1
speculative = {{"method": "draft_model", "model": "absent", "num_speculative_tokens": 3}}
resolve(EngineConfig.parse({{"speculative_config": speculative}}))
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert run(source).stdout.strip() == "[]"


def test_the_list_command_answers_in_well_under_half_a_second():
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("from specreg.cli import main; main(['list'])")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time, and the best of a few: other processes share the machine.
    assert min(seconds() for _ in range(3)) < 0.5


def test_the_command_line_is_installed_as_a_console_script():
    found = run("import sys; from specreg.cli import main; main(['--help'])").stdout
    assert all(command in found for command in ("generate", "list", "plan"))
