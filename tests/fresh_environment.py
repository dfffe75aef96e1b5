"""A virtual environment of its own for tests that install a package as its user does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

__all__ = ["FreshEnvironment", "build_wheel"]


def _run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=environment
    )


def _run_or_fail(*command: str | Path, cwd: Path | None = None) -> None:
    done = _run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(project: Path, folder: Path) -> Path:
    """Build the project's wheel into `folder`, from a copy so that the sources stay clean."""
    sources = folder / "sources" / project.name
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(project, sources, ignore=ignored)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    _run_or_fail(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, sources)
    (wheel,) = folder.glob("*.whl")
    return wheel


class FreshEnvironment:
    """A virtual environment that sees what this Python has, and what is installed into it.

    Args:
        folder: where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        _run_or_fail(sys.executable, "-m", "venv", "--without-pip", folder)
        site_packages = next(folder.glob("lib/python*/site-packages"))
        # addsitedir, since an editable specreg is a .pth file there.
        heavy = sysconfig.get_paths()["purelib"]
        line = f"import site; site.addsitedir({heavy!r})\n"
        (site_packages / "packages_of_the_tests.pth").write_text(line)

    def install(self, wheel: Path) -> None:
        """Install a wheel with pip, without dependencies and without the network."""
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        _run_or_fail(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel)

    def specreg(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of specreg outside of the source tree."""
        return _run(self.python, "-m", "specreg", *arguments, cwd=self.folder)

    def pytest(self, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the tests in a folder, without writing into it."""
        quiet = ("-q", "-p", "no:cacheprovider", *options)
        return _run(self.python, "-B", "-m", "pytest", *quiet, folder, cwd=self.folder)

    def specreg_json(self, *arguments: str) -> Any:
        """What the command prints with `--json`; it must succeed."""
        done = self.specreg(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)
