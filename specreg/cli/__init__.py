"""The command line. `main` is the console script `specreg`; one file a command."""

from specreg.cli.app import main

__all__ = ["main"]
