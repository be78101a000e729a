"""Quire's logger: plain lines on stderr. QUIRE_LOG_LEVEL sets how many (default INFO)."""

from __future__ import annotations

import logging
import os

from quire.errors import ConfigError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def get_logger() -> logging.Logger:
    """The `quire` logger. A program that configured logging keeps its own handlers."""
    logger = logging.getLogger("quire")
    if not logger.handlers and not logging.getLogger().handlers:
        level = os.environ.get("QUIRE_LOG_LEVEL", "INFO").upper()
        if level not in _LEVELS:
            raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(_LEVELS)}, got {level!r}")
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("quire: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    return logger
