"""vLLM's home of the engine's arguments."""

from quire.config import EngineConfig as AsyncEngineArgs
from quire.config import EngineConfig as EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
