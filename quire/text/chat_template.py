"""Chat templates: a conversation to the text that the model was trained on.

Templates come with models, so they are somebody else's programs: they run in jinja2's sandbox, without access to
Python's internals and without changing what they are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import BadRequestError, TokenizerError
from quire.text.messages import as_parts, as_string, normalized

if TYPE_CHECKING:
    from jinja2 import Template, nodes

    from quire.text.tokenizer import Tokenizer

# Written at the end of the message to continue, and looked for in the rendered text. The noncharacters around it
# cannot be in a message: they are stripped by no template and meant by nobody.
_CONTINUE_HERE = "\ufdd0continue-here\ufdd1"
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
        if template is None:
            template = tokenizer.chat_template
        if template is None:
            raise TokenizerError(_no_template(tokenizer))
        self.source = template
        self._template, self._wants_parts, self._takes_strings = _compile(template)
        named = {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.unk_token,
        }
        self._tokens = {name: token for name, token in named.items() if token is not None}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: str = "auto",
        **kwargs: Any,
    ) -> str:
        """The conversation as text, ready to be encoded with add_special_tokens=False.

        `add_generation_prompt` ends it where the assistant begins to speak, `continue_final_message` within the last
        message. `content_format` is the form in which it gets contents: "string", "openai" (a list of parts), or as it
        seems to want them. `kwargs` are the template's own switches.
        """
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
        if continue_final_message:
            _mark_end(conversation[-1])
        text = self._run({**self._tokens, **kwargs}, conversation, add_generation_prompt, tools)
        if not continue_final_message:
            return text
        end = text.rfind(_CONTINUE_HERE)
        if end < 0:
            raise BadRequestError(
                "the chat template leaves out the final message, so it cannot be continued", param="messages"
            )
        return text[:end]

    def _shape(self, message: dict[str, Any], content_format: str) -> dict[str, Any]:
        """Content in the form that the template reads: text, or a list of parts."""
        content = message["content"]
        wants_parts = self._wants_parts and (isinstance(content, list) or not self._takes_strings)
        if content_format == "openai" or (content_format == "auto" and wants_parts):
            message["content"] = as_parts(content)
        else:
            message["content"] = as_string(content)
        return message

    def _run(
        self,
        variables: dict[str, Any],
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        from jinja2.exceptions import SecurityError, TemplateError

        try:
            return self._template.render(
                variables, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except SecurityError as error:
            raise TokenizerError(
                f"the chat template does what its sandbox forbids ({error}): pass another one with chat_template=..."
            ) from error
        except _RaisedByTemplate as error:
            raise BadRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            raise BadRequestError(
                f"the chat template cannot render these messages: {error} ({type(error).__name__}); "
                "check the roles, contents and tools that the model's template expects",
                param="messages",
            ) from error


class _RaisedByTemplate(Exception):
    """The template called raise_exception(...)."""


def _compile(source: str) -> tuple[Template, bool, bool]:
    """The template, whether it walks through a message's parts, and whether it takes plain text as well."""
    from jinja2 import TemplateSyntaxError

    try:
        environment = _environment()
        tree = environment.parse(source)
        wants_parts, takes_strings = _loops_over_content(tree), _tests_for_string(tree)
        return environment.from_string(tree), wants_parts, takes_strings
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template is not valid jinja2 (line {error.lineno}: {error.message}): correct it or pass "
            "another one with chat_template=..."
        ) from error


def _environment() -> Any:
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} marks what the assistant said, for training; here it means nothing."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            # jinja2 would print a forbidden attribute as "" and only refuse to go on from it.
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r}")

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own escapes <, > and & for web pages, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def _loops_over_content(tree: nodes.Template) -> bool:
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        match loop.iter:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name="content"):
                return True
    return False


def _tests_for_string(tree: nodes.Template) -> bool:
    from jinja2 import nodes

    return any(test.name == "string" for test in tree.find_all(nodes.Test))


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
