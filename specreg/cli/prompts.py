"""Prompt files: one JSON value a line."""

from __future__ import annotations

import json
from pathlib import Path

from specreg.errors import AdmissionError

__all__ = ["read_prompts"]


def read_prompts(path: Path, key: str = "prompt") -> list[str]:
    """The prompts of a JSON Lines file, in order; blank lines are passed over.

    Args:
        path: each line is a JSON string, or an object whose `key` is a string or a list of strings
            (turns), of which the first is taken.
        key: name of the field that holds the prompt.

    Raises:
        AdmissionError: the file cannot be read, holds no prompt, or a line is not of this form.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise AdmissionError(
            "the prompt file cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            fix="name a readable JSON Lines file in UTF-8",
        ) from error
    prompts = [
        _prompt_of(line, key, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise AdmissionError(
            "the prompt file holds no prompt",
            where=str(path),
            got="no lines with content; allowed: at least one",
            fix='write one prompt a line, such as {"prompt": "Once upon a time"}',
        )
    return prompts


def _prompt_of(line: str, key: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _line_error(where, f"{error}", key) from error
    if isinstance(value, dict):
        if key not in value:
            raise _line_error(where, f"an object with the keys {sorted(value)}", key)
        value = value[key]
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        raise _line_error(where, f"{json.dumps(value)[:80]}", key)
    return value


def _line_error(where: str, got: str, key: str) -> AdmissionError:
    return AdmissionError(
        "a line of the prompt file is no prompt",
        where=where,
        got=f"{got}; allowed: a JSON string, or an object whose {key!r} is a string or a list",
        fix="mend the line, or name the field that holds the prompt with --prompt-key",
    )
