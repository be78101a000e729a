"""What models write beside plain text: tool calls and thinking. Formats are data, and one incremental parser reads them
all. Nothing here knows engines or HTTP."""

from quire.agents.answer import AnswerDelta, AnswerParser, CallDelta
from quire.agents.formats import THINKING_FORMATS, Dialect, ThinkingFormat, find_dialect
from quire.agents.tools import ToolChoice, checked_tools, tool_grammar

__all__ = [
    "THINKING_FORMATS",
    "AnswerDelta",
    "AnswerParser",
    "CallDelta",
    "Dialect",
    "ThinkingFormat",
    "ToolChoice",
    "checked_tools",
    "find_dialect",
    "tool_grammar",
]
