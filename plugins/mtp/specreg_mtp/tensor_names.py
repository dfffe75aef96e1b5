"""Which tensors of a file are MTP modules, and what they are called here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from specreg_mtp.conventions import Convention

__all__ = ["ModuleTensor", "TensorNames"]

# Multimodal and bare checkpoints write the same names under other roots.
_ROOTS = ((re.compile(r"^(model\.language_model\.|language_model\.model\.)"), "model."),)
_BARE = re.compile(r"^(layers|embed_tokens)\.")


class ModuleTensor(NamedTuple):
    """What a name says.

    Attributes:
        module: number of the module; None for what a file has once.
        part: of the module, or `"ignored"`.
        rest: of the name, below the part; the reason for what is ignored.
    """

    module: int | None
    part: str
    rest: str


def plain_name(name: str) -> str:
    """A name below the root that text models write: `model.` for what has none."""
    for root, plain in _ROOTS:
        name = root.sub(plain, name)
    return f"model.{name}" if _BARE.match(name) else name


class TensorNames:
    """Reads names by a convention.

    Args:
        convention: of the file.
        num_target_layers: where modules that are numbered on from the target's layers begin.
    """

    def __init__(self, convention: Convention, num_target_layers: int) -> None:
        self.convention, self.num_target_layers = convention, num_target_layers
        # The longest first: a part may lie below the prefix of the decoder layer.
        by_length = sorted(convention.names.items(), key=lambda item: -len(item[1]))
        self._parts = [(part, _pattern(name, r"\.(?P<rest>.+)")) for part, name in by_length]
        self._ignored = [(_pattern(name, ""), why) for name, why in convention.ignored.items()]

    def read(self, name: str) -> ModuleTensor | None:
        """What a tensor of this name is; None when it is not of a module."""
        plain = plain_name(name)
        for pattern, why in self._ignored:
            if (match := pattern.fullmatch(plain)) and (number := self._number(match)) != -1:
                return ModuleTensor(number, "ignored", why)
        for part, pattern in self._parts:
            match = pattern.fullmatch(plain)
            if match and (number := self._number(match)) != -1:
                rest = (
                    match["rest"].removeprefix("transformer.") if part == "layer" else match["rest"]
                )
                return ModuleTensor(number, part, self._own(rest) if part == "layer" else rest)
        return None

    def write(self, module: int, part: str, rest: str) -> str:
        """The name of a tensor, as `read` reads it."""
        for theirs, own in self.convention.layer_names.items():
            if part == "layer" and rest.startswith(f"{own}."):
                rest = theirs + rest.removeprefix(own)
        stem = self.convention.names[part].format(i=module, n=self.num_target_layers + module)
        return f"{stem}.{rest}"

    def modules(self, names: Iterable[str]) -> tuple[int, ...]:
        """Numbers of the modules that have tensors among `names`."""
        read = [tensor for name in names if (tensor := self.read(name)) is not None]
        return tuple(sorted({tensor.module or 0 for tensor in read if tensor.part != "ignored"}))

    def _number(self, match: re.Match[str]) -> int | None:
        """Of the module; None where the name has no number; -1 for a layer of the target."""
        groups = match.groupdict()
        if (index := groups.get("i")) is not None:
            return int(index)
        if (layer := groups.get("n")) is not None:
            return max(-1, int(layer) - self.num_target_layers)
        return None

    def _own(self, rest: str) -> str:
        for theirs, own in self.convention.layer_names.items():
            if rest.startswith(f"{theirs}."):
                return own + rest.removeprefix(theirs)
        return rest


def _pattern(name: str, behind: str) -> re.Pattern[str]:
    escaped = re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{n\}", r"(?P<n>\d+)")
    return re.compile(escaped + behind)
