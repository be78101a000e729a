"""The parser: an answer's text, in whatever pieces it comes, told apart into thinking, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.agents.formats import ThinkingFormat, ToolFormat
from quire.agents.readers import NotACall, Reading, until


@dataclass(slots=True)
class CallDelta:
    """A part of a tool call. `name` stands in the first part alone."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class AnswerDelta:
    """The parts that a piece of text brought."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Parses one answer. The result does not depend on how the text is cut into pieces."""

    def __init__(
        self,
        *,
        thinking: ThinkingFormat | None = None,
        is_open: bool = False,
        tools: ToolFormat | None = None,
        names: frozenset[str] = frozenset(),
    ) -> None:
        """is_open: the prompt ended inside a thought. names: of the tools that may be called."""
        self.names = names
        self.num_calls = 0
        self._thinking = thinking
        self._tools = tools if names else None
        self._markers = () if self._tools is None else (*self._tools.begins, *self._tools.dropped)
        self.is_thinking = thinking is not None and is_open
        self.may_think = thinking is not None and not is_open
        self._is_new = True  # no content has been shown yet
        self._after_call = False
        self._held = ""  # text that may become a marker, or space whose meaning is not known yet
        self._reader: Reading | None = None
        self._raw: list[str] = []  # what the reader has read, while it may turn out to be text
        self._marker = self._space = ""  # and what stood before
        self._counts = False  # the reader has told of a call
        self._arguments: list[str] = []
        self._delta = AnswerDelta()

    def push(self, text: str) -> AnswerDelta:
        self._read(text)
        return self._take()

    def finish(self) -> AnswerDelta:
        """The text has ended. Half a call is dropped: it is neither a call nor content."""
        held, self._held = self._held, ""
        if self.is_thinking:
            self._delta.reasoning += held
        elif self._reader is None:
            self._show(held)
        return self._take()

    # -- as readers see it

    def begin(self, name: str) -> None:
        self._end_arguments()
        self._counts = True
        self._delta.calls.append(CallDelta(self.num_calls, name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        self._arguments.append(text)

    # -- inside

    def _end_arguments(self) -> None:
        """Add the arguments of the last call that have come since the last time to the delta."""
        if not self._arguments:
            return
        calls = self._delta.calls
        if not calls or calls[-1].index != self.num_calls - 1:
            calls.append(CallDelta(self.num_calls - 1))
        calls[-1].arguments += "".join(self._arguments)
        self._arguments.clear()

    def _take(self) -> AnswerDelta:
        self._end_arguments()
        delta, self._delta = self._delta, AnswerDelta()
        return delta

    def _read(self, text: str) -> None:
        while text:
            if self._reader is not None:
                text = self._read_call(text)
            elif self.is_thinking:
                text = self._read_thought(text)
            elif self.may_think:
                text = self._read_start(text)
            else:
                text = self._read_content(text)

    def _read_start(self, text: str) -> str:
        """An answer may begin with a thought, after space."""
        assert self._thinking is not None
        begin, whole = self._thinking.begin, self._held + text
        bare = whole.lstrip()
        if begin.startswith(bare) and bare != begin:  # it may come yet
            self._held = whole
            return ""
        self._held, self.may_think = "", False
        if not bare.startswith(begin):
            return whole
        self.is_thinking = True
        return bare[len(begin) :]

    def _read_thought(self, text: str) -> str:
        assert self._thinking is not None
        end, whole = self._thinking.end, self._held + text
        at = whole.find(end)
        if at < 0:
            keep = _num_held(whole, (end,))
            self._held = whole[len(whole) - keep :]
            self._delta.reasoning += whole[: len(whole) - keep]
            return ""
        self._delta.reasoning += whole[:at]
        self._held, self.is_thinking = "", False
        self._after_call = True  # space between a thought and an answer is no content either
        return whole[at + len(end) :]

    def _read_content(self, text: str) -> str:
        whole, self._held = self._held + text, ""
        tools = self._tools
        if tools is None:
            if self._after_call:
                whole = whole.lstrip()
                self._after_call = not whole
            self._delta.content += whole
            return ""
        if self._is_new and tools.bare:
            bare = whole.lstrip()
            if not bare:
                self._held = whole
                return ""
            if bare[0] == tools.bare:
                self._start_reading("", whole[: len(whole) - len(bare)])
                return bare
        found = [(at, -len(marker), marker) for marker in self._markers if (at := whole.find(marker)) >= 0]
        if found:
            at, _, marker = min(found)
            before = whole[:at].rstrip()
            self._show(before)
            if marker in tools.dropped:
                self._after_call = True
            else:
                self._start_reading(marker, whole[len(before) : at])
            return whole[at + len(marker) :]
        keep = _num_held(whole, self._markers)
        shown, self._held = whole[: len(whole) - keep], whole[len(whole) - keep :]
        bare = shown.rstrip()
        self._held = shown[len(bare) :] + self._held
        self._show(bare)
        return ""

    def _show(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._is_new = self._after_call = False
            self._delta.content += text

    def _start_reading(self, marker: str, space: str) -> None:
        assert self._tools is not None
        self._space, self._marker, self._counts = space, marker, False
        self._raw.clear()
        self._reader = self._tools.read(self)
        next(self._reader)

    def _read_call(self, text: str) -> str:
        assert self._reader is not None and self._tools is not None
        for i, char in enumerate(text):
            if not self._counts:
                self._raw.append(char)
            try:
                self._reader.send(char)
            except StopIteration:
                self._reader, self._after_call, self._is_new = None, True, False
                return text[i + 1 :]
            except NotACall:
                self._reader = None
                if not self._counts:
                    # The marker is text after all, and what follows it is looked at anew.
                    shown = self._marker or self._raw[0]
                    rest = "".join(self._raw)[len(shown) - len(self._marker) :] + text[i + 1 :]
                    self._is_new = False
                    self._show(self._space + shown)
                    return rest
                self._after_call, self._is_new = True, False
                if not self._tools.end:
                    return text[i:]
                self._reader = until(self._tools.end)  # wrong text between a call and its marker is no content
                next(self._reader)
                return text[i:]
        return ""


def _num_held(text: str, markers: tuple[str, ...]) -> int:
    """How many of the last characters may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[len(text) - count :]
        if any(marker.startswith(tail) for marker in markers):
            return count
    return 0
