"""The two forms of a block drafter's `config.json`, behind one set of readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specreg.config_reader import ConfigReader

__all__ = ["ConfigForm"]


class ConfigForm(NamedTuple):
    """Where a `config.json` keeps what.

    The Hugging Face form is a decoder's config with a section `dflash_config`; that of the library
    `speculators` keeps the decoder in `transformer_layer_config` and the rest at the top.

    Attributes:
        top: the whole file; call its `report` once when everything has been read.
        decoder: what describes the decoder layers.
        section: `dflash_config`, where the Hugging Face form has the drafter's own keys; `top` in
            the form of `speculators`.
        is_speculators: which form it is. Told by `speculators_model_type`: `architectures` may be
            the same in both.
    """

    top: ConfigReader
    decoder: ConfigReader
    section: ConfigReader
    is_speculators: bool

    @classmethod
    def of(cls, draft_config: Mapping[str, Any], where: str = "config.json") -> ConfigForm:
        """Readers of a file. Raises `CheckpointError` where a section is no object."""
        top = ConfigReader(draft_config, where)
        if "speculators_model_type" in top:
            return cls(top, top.section("transformer_layer_config"), top, True)
        return cls(top, top, top.section("dflash_config"), False)

    def reader_of(self, key: str) -> ConfigReader:
        """The reader that has a drafter's own key: the section, or else the top.

        The key counts as read in both: some files have it twice.
        """
        self.top.accept(key)
        self.section.accept(key)
        return self.section if key in self.section else self.top
