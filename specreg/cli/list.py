"""`specreg list`: what is installed, and what is installed but broken."""

from __future__ import annotations

import json
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any

import typer

from specreg.capabilities import Capabilities
from specreg.cli.matrix import print_matrix
from specreg.registry import BrokenPlugin, RegisteredSpeculator, get_registry
from specreg.specs import DraftSetup

__all__ = ["list_speculators"]


def list_speculators(
    matrix: Annotated[
        bool, typer.Option("--matrix", help="What sharding comes to, a row an outcome.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List speculators and broken plugins."""
    registry = get_registry()
    if matrix:
        print_matrix(registry, as_json=as_json)
        return
    if as_json:
        listing = {
            "speculators": [_speculator(entry) for entry in registry.speculators],
            "broken": [_broken(plugin) for plugin in registry.broken],
        }
        print(json.dumps(listing, indent=2))
        return
    for entry in registry.speculators:
        _print_speculator(entry)
    for plugin in registry.broken:
        source = plugin.source
        typer.secho(f"BROKEN {source}", fg=typer.colors.RED, bold=True)
        _print_facts({"entry point": source.target, "error": plugin.error})
    for source in registry.left_out:
        typer.secho(f"left out by the environment: {source}", dim=True)
    if not registry.speculators:
        print("no speculator is installed")


def _speculator(entry: RegisteredSpeculator) -> dict[str, Any]:
    spec = entry.spec
    return {
        "name": spec.name,
        "summary": spec.summary,
        "methods": list(spec.methods),
        "architectures": list(spec.architectures),
        "model_types": list(spec.model_types),
        "capabilities": _capabilities(spec.capabilities_for(DraftSetup())),
        "distribution": entry.distribution,
        "version": entry.version,
        "api_version": spec.api_version,
    }


def _capabilities(capabilities: Capabilities) -> dict[str, Any]:
    facts = {item.name: getattr(capabilities, item.name) for item in fields(Capabilities)}
    facts["layouts"] = sorted(layout.value for layout in capabilities.layouts)
    return {key: fact.value if isinstance(fact, Enum) else fact for key, fact in facts.items()}


def _broken(plugin: BrokenPlugin) -> dict[str, Any]:
    return {
        "name": plugin.source.name,
        "target": plugin.source.target,
        "distribution": plugin.source.distribution,
        "version": plugin.source.version,
        "error": plugin.error,
        "traceback": plugin.traceback,
    }


def _print_speculator(entry: RegisteredSpeculator) -> None:
    spec, facts = entry.spec, _capabilities(entry.spec.capabilities_for(DraftSetup()))
    typer.secho(f"{spec.name} ({entry.distribution} {entry.version})", bold=True)
    style, layouts = facts.pop("style"), facts.pop("layouts")
    _print_facts(
        {
            "summary": spec.summary,
            "methods": ", ".join(spec.methods),
            "architectures": ", ".join(spec.architectures) or "any",
            "model types": ", ".join(spec.model_types),
            "style": style,
            "layouts": ", ".join(layouts),
            "declares": ", ".join(key for key, fact in facts.items() if fact is True),
            "facts": ", ".join(
                f"{key} {fact}" for key, fact in facts.items() if type(fact) in (int, str)
            ),
        }
    )


def _print_facts(facts: dict[str, str]) -> None:
    for name, value in facts.items():
        if value:
            print(f"  {name:14}{value}")
