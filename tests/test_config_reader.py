from __future__ import annotations

import logging

import pytest

from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError


def reader(**config) -> ConfigReader:
    return ConfigReader(config, "draft/config.json")


def test_a_null_key_is_absent():
    config = reader(width=None)
    assert "width" not in config
    assert config.get("width", 3) == 3
    assert config.integer("width", None) is None
    assert config.integers("width") is None
    assert config.section("width").config == {}
    with pytest.raises(CheckpointError, match=r"lacks 'width'"):
        config.integer("width")


def test_values_come_back_as_their_kind():
    config = reader(width=4, eps=1, is_causal=True, act="silu", ids=[2, 0], kinds=["a"])
    assert config.integer("width") == 4
    assert config.number("eps") == 1.0
    assert isinstance(config.number("eps"), float)
    assert config.flag("is_causal", False) is True
    assert config.text("act") == "silu"
    assert config.integers("ids") == (2, 0)
    assert config.texts("kinds") == ("a",)
    assert config.unread() == []


@pytest.mark.parametrize(
    ("method", "value", "allowed"),
    [
        ("integer", 0, "an integer of at least 1"),
        ("integer", True, "an integer of at least 1"),
        ("integer", "4", "an integer of at least 1"),
        ("number", True, "a number"),
        ("number", "1e-6", "a number"),
        ("number", float("nan"), "a finite number"),
        ("number", float("inf"), "a finite number"),
        ("text", 1, "a string"),
        ("integers", [1, -1], "a list of integers of at least 0"),
        ("integers", 1, "a list of integers of at least 0"),
        ("texts", ["a", 1], "a list of strings"),
        ("section", [], "an object"),
    ],
)
def test_a_value_of_another_kind_names_file_and_key(method, value, allowed):
    with pytest.raises(CheckpointError) as caught:
        getattr(reader(key=value), method)("key")
    assert caught.value.where == "draft/config.json, key 'key'"
    assert caught.value.got == f"{value!r}; allowed: {allowed}"


def test_a_flag_takes_no_number():
    with pytest.raises(CheckpointError, match="allowed: true or false"):
        reader(key=1).flag("key", False)


def test_keys_that_nothing_reads_are_told_with_their_section(caplog):
    config = reader(width=1, hidden_act=None, dtype="float32", inner={"a": 1, "b": 2}, odd=[])
    config.integer("width")
    config.section("inner").integer("a")
    assert config.unread() == ["inner.b", "odd"]
    config.accept("odd")
    with caplog.at_level(logging.INFO):
        config.report()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == ["draft/config.json: keys that nothing reads: inner.b"]


def test_defaults_that_are_taken_are_told(caplog):
    config = reader(inner={})
    config.integer("width", 4)
    config.flag("is_causal", False)
    config.section("inner").number("theta", 1e4)
    config.integer("optional", None)
    with caplog.at_level(logging.INFO):
        config.report()
    (message,) = caplog.messages
    assert message.endswith("inner.theta = 10000.0, is_causal = False, width = 4") or (
        "width = 4" in message and "inner.theta = 10000.0" in message
    )
    assert "optional" not in message
