"""Prompt files of `specreg generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from specreg.cli.prompts import read_prompts
from specreg.errors import AdmissionError


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_strings_objects_and_turns_are_prompts_and_blank_lines_are_passed_over(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, '"one"\n\n{"prompt": "two"}\n{"prompt": ["three", "later"]}\n')
    assert read_prompts(path) == ["one", "two", "three"]


def test_the_field_that_holds_the_prompt_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "why?", "answer": "so"}\n')
    assert read_prompts(path, key="question") == ["why?"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"fine"\nnot json\n', "line 2"),
        ('{"text": "no such field"}\n', "--prompt-key"),
        ('{"prompt": 3}\n', "a JSON string"),
        ('{"prompt": []}\n', "a JSON string"),
        ("\n\n", "holds no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        read_prompts(write(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdmissionError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
