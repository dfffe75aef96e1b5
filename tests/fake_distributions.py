"""Installed distributions for tests: dist-info folders and modules in a folder of `sys.path`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["PLUGIN", "install"]

PLUGIN = """
from specreg.capabilities import Capabilities, DraftingStyle
from specreg.plugin import SpeculatorSpec, hookimpl

CAPABILITIES = Capabilities(style=DraftingStyle.AUTOREGRESSIVE, supports_probabilistic=True)

@hookimpl
def specreg_speculators():
    return [
        SpeculatorSpec(
            name="{name}",
            methods=("{name}",),
            factory="{name}_code:make",
            capabilities=CAPABILITIES,
            needs_checkpoint=False,
        )
    ]
"""
"""A module that offers one speculator `{name}`; `str.format` it."""


def install(
    folder: Path,
    distribution: str,
    *,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str],
    version: str = "1.0",
) -> None:
    """Write a distribution into `folder`, which belongs on `sys.path`.

    Args:
        folder: created when it is not there.
        distribution: its name.
        entry_points: of the group `specreg`, name to target.
        modules: source by module name.
        version: of the distribution.
    """
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    lines = [f"{name} = {target}" for name, target in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[specreg]", *lines, ""]))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
