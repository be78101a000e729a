"""Quire: LLM inference and serving on paged KV memory."""

__version__ = "0.1.0"
