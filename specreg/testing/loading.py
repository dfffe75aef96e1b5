"""Loading a subject's speculator by itself, and listening to what it says."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from specreg.runtime.loading import load_models
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.speculator import Speculator
from specreg.testing.lab import Lab

__all__ = ["load_speculator"]

LOGGERS = ("", "transformers")


class _Listener(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


def load_speculator(lab: Lab) -> tuple[Speculator, list[str]]:
    """Load on one rank; returns the speculator, and every warning, logged or raised.

    Raises:
        SpecregError: the speculator refuses.
    """
    messages: list[str] = []
    with _heard(messages), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = load_models(lab.config(lab.plain()), TensorParallel(), registry=lab.registry)
    assert models.drafting is not None
    messages += (str(warning.message) for warning in caught)
    return models.drafting.speculator, messages


@contextmanager
def _heard(messages: list[str]) -> Iterator[None]:
    """Warnings go to `messages` instead of the screen."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.handlers, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.disabled = [_Listener(messages)], False
    try:
        yield
    finally:
        for logger, handlers, was_disabled in before:
            logger.handlers, logger.disabled = handlers, was_disabled
