"""Chat templates: a conversation to the text that the model was trained on.

Templates come with models, so they are somebody else's programs: they run in a process of their own
(`template_worker.py`), in jinja2's sandbox, with limits on time and memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import BadRequestError, TemplateLimitError, TokenizerError
from quire.text.template_process import TemplateProcessDied, TemplateStopped, processes

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

# Written at the end of the message to continue, and looked for in the rendered text. No message contains the
# noncharacters around it, and no template strips them.
_CONTINUE_HERE = "\ufdd0continue-here\ufdd1"
# Names of what `ChatTemplate.encode` takes, which are no switches of a template's.
NOT_SWITCHES = frozenset(
    {"self", "messages", "chat_template", "content_format", "at_most", "add_special_tokens", "allow_special_tokens"}
)
_TRIED_TOKENS = 4_096  # far more than any template's own words have
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})


def read_chat_template(value: str) -> str:
    """What `--chat-template` and `chat_template=` take: the name of a file, or the template itself."""
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"chat_template={value!r} is neither a template (it has no {{...}}) nor a file that can be read: {error}"
        ) from error


class ChatTemplate:
    """One compiled template. `template` None means the tokenizer's own."""

    def __init__(self, template: str | None, tokenizer: Tokenizer) -> None:
        self.name = f"the chat template of {tokenizer.source}" if template is None else "the chat template"
        if template is None:
            template = tokenizer.chat_template
        if template is None:
            raise TokenizerError(_no_template(tokenizer))
        self.source = template
        self._tokenizer = tokenizer
        named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._tokens: dict[str, str] = {name: token for name, token in named.items() if token is not None}
        self._tried: bool | TemplateLimitError | None = None
        facts = self._run({}, None)
        self._wants_parts, self._takes_strings = facts["wants_parts"], facts["takes_strings"]

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        at_most: int | None = None,
        add_special_tokens: bool = False,
        allow_special_tokens: bool = False,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """The conversation as text and as token ids. `options` are those of `render`.

        Special tokens are those that the template writes; in what the messages say they are plain text, unless
        `allow_special_tokens`.
        """
        tokenizer, controls = self._tokenizer, self._tokenizer.control_tokens
        takes_marks = self.try_out()
        if allow_special_tokens or not controls.marks:
            text = self.render(messages, **options)
            return text, tokenizer.encode(text, add_special_tokens=add_special_tokens, at_most=at_most)
        if takes_marks:
            marked = self._render(controls.marks, messages, **options)
        else:
            marked = controls.mark_all(self._render({}, controls.cut_up(messages), **controls.cut_up(options)))
        text = controls.without_marks(marked)
        token_ids = tokenizer.encode(text, add_special_tokens=False, at_most=at_most)
        if not controls.are_all_marked(marked, token_ids):
            return text, controls.encode(marked, add_special_tokens=add_special_tokens)
        # Almost always: nothing else looked like a special token.
        return text, tokenizer.encode(text) if add_special_tokens else token_ids

    def try_out(self) -> bool:
        """Whether the template writes its special tokens as they are, so that marks can stand for them. Some make them
        of pieces, which shows with messages that hold none.

        Raises TokenizerError where it cannot work. One that goes over a limit with three short messages is not run
        again: every chat would cost as much.
        """
        if self._tried is None:
            try:
                self._tried = self._takes_marks()
            except TemplateLimitError as error:
                self._tried = error
        if isinstance(self._tried, TemplateLimitError):
            raise self._tried.with_traceback(None)
        return self._tried

    def _takes_marks(self) -> bool:
        tokenizer, controls = self._tokenizer, self._tokenizer.control_tokens
        for roles in (("user", "assistant", "user"), ("system", "user"), ("user", "assistant", "tool")):
            messages = [{"role": role, "content": "Hello"} for role in roles]
            try:
                text, marked = self.render(messages), self._render(controls.marks, messages)
                token_ids = tokenizer.encode(text, add_special_tokens=False, at_most=_TRIED_TOKENS)
            except BadRequestError:
                continue  # not its roles
            if text != controls.without_marks(marked) or not controls.are_all_marked(marked, token_ids):
                return False
        return True

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The conversation as text, ready to be encoded with add_special_tokens=False.

        `add_generation_prompt` ends it where the assistant begins to speak, `continue_final_message` within the last
        message. `content_format` is the form in which it gets contents: "string", "openai" (a list of parts), or as it
        seems to want them. Others are the template's own switches.
        """
        return self._render({}, messages, **options)

    def _render(
        self,
        marks: Mapping[str, str],
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: str = "auto",
        **kwargs: Any,
    ) -> str:
        if continue_final_message and add_generation_prompt:
            raise BadRequestError(
                "continue_final_message continues the last message, add_generation_prompt begins a new one: "
                "set add_generation_prompt to false",
                param="continue_final_message",
            )
        reserved = _RESERVED.intersection(kwargs)
        if reserved:
            raise BadRequestError(
                f"chat_template_kwargs must not contain {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        conversation = [self._shape(message, content_format) for message in normalized(messages)]
        if "tool_calls" not in self.source:
            _refuse_tool_calls(conversation)
        if continue_final_message:
            _mark_end(conversation[-1])
        variables = {
            **{name: marks.get(token, token) for name, token in self._tokens.items()},
            **kwargs,
            "messages": conversation,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text: str = self._run(marks, variables)["text"]
        if not continue_final_message:
            return text
        end = text.rfind(_CONTINUE_HERE)
        if end < 0:
            raise BadRequestError(
                "the chat template leaves out the final message, so it cannot be continued", param="messages"
            )
        return text[:end]

    @cached_property
    def _hash(self) -> str:
        return hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()

    def _shape(self, message: dict[str, Any], content_format: str) -> dict[str, Any]:
        """Content in the form that the template reads: text, or a list of parts."""
        content = message["content"]
        wants_parts = self._wants_parts and (isinstance(content, list) or not self._takes_strings)
        if content_format == "openai" or (content_format == "auto" and wants_parts):
            message["content"] = as_parts(content)
        else:
            message["content"] = as_string(content)
        return message

    def _run(self, marks: Mapping[str, str], variables: dict[str, Any] | None) -> dict[str, Any]:
        """Renders, or compiles where there are no variables."""
        key = self._hash + next(iter(marks.values()), "")  # marks are never those of another tokenizer
        template = (key, self.source, marks)
        try:
            try:
                answer = processes.run(template, None if variables is None else ("render", variables))
            except ValueError:  # not Python's own types alone; most are
                answer = processes.run(template, ("render", plain_data(variables)))
        except RecursionError:
            raise BadRequestError("the messages or switches are nested too deeply", param="messages") from None
        except TemplateStopped as error:
            raise TemplateLimitError(
                f"{self.name} {error} and was stopped: give it fewer messages, or pass another one with "
                "chat_template=...",
                limit=str(error),
            ) from None
        except TemplateProcessDied as error:
            raise TokenizerError(f"{self.name} {error}: try again") from None
        message = answer.get("message")
        kind = answer.get("error")
        if kind is None:
            return answer
        if variables is None:
            raise TokenizerError(
                f"{self.name} is not valid jinja2 ({message}): correct it or pass another one with chat_template=..."
            )
        match kind:
            case "forbidden":
                raise TokenizerError(
                    f"{self.name} does what its sandbox forbids ({message}): pass another one with chat_template=..."
                )
            case "raised":
                raise BadRequestError(f"the chat template refuses these messages: {message}", param="messages")
        raise BadRequestError(
            f"the chat template cannot render these messages: {message}; check the roles, contents and tools that "
            "the model's template expects",
            param="messages",
        )


def _refuse_tool_calls(conversation: list[dict[str, Any]]) -> None:
    """A template that never mentions them would show the model an empty message."""
    for index, message in enumerate(conversation):
        if message.get("tool_calls"):
            raise BadRequestError(
                f"messages[{index}].tool_calls: this model's chat template has no place for tool calls, so the model "
                "would not see them: write them into the message's content",
                param="messages",
            )


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_HERE
    elif content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + _CONTINUE_HERE}
    else:
        message["content"] = [{"type": "text", "text": _CONTINUE_HERE}]


def _no_template(tokenizer: Tokenizer) -> str:
    named = ", ".join(sorted(tokenizer.chat_templates))
    has = f"has several chat templates ({named}) and no default" if named else "has no chat template"
    return (
        f"{tokenizer.source} {has}: pass one with chat_template=... (the template's text or a file; "
        "--chat-template FILE for the server), or use completions instead of chat"
    )


# -- the messages of a request, checked and in one form

Parts = list[dict[str, Any]]


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies in which every message has a role and a content that is a string or a list of text parts."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _bad("messages", f"must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise _bad("messages", "must not be empty")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def as_string(content: str | Parts) -> str:
    """Text parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_parts(content: str | Parts) -> Parts:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def plain_data(value: Any) -> Any:
    """The same as dicts, lists, strings and numbers of Python's own, which can go to another process."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(one) for one in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Integral):
        return int(value)
    raise _bad("messages", f"and the template's variables must be plain data, and {type(value).__name__} is not")


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(where, f"must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", f"must be a string such as 'user', got {role!r}")
    checked = dict(message)
    content = message.get("content")
    if content is None and (message.get("tool_calls") or role == "assistant"):
        content = ""  # an assistant that only calls tools says nothing
    checked["content"] = _content(content, f"{where}.content")
    if message.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return checked


def _content(content: Any, where: str) -> str | Parts:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _bad(where, f"must be a string or a list of text parts, got {content!r}")
    parts: Parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            what = f"type {kind!r}" if isinstance(part, Mapping) else type(part).__name__
            raise _bad(f"{where}[{i}]", f'{what} is not supported: send {{"type": "text", "text": ...}}')
        if not isinstance(part.get("text"), str):
            raise _bad(f"{where}[{i}].text", f"must be a string, got {part.get('text')!r}")
        parts.append(dict(part))
    return parts


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Arguments arrive as JSON text, as they left; templates want the object."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise _bad(where, "must be a list of objects")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise _bad(f"{where}[{i}].function.arguments", f"must be JSON: {error}") from None
            call = {**call, "function": {**function, "arguments": arguments}}
        checked.append(call)
    return checked


def _bad(where: str, what: str) -> BadRequestError:
    return BadRequestError(f"{where} {what}", param="messages")
