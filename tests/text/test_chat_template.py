from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.errors import BadRequestError, TokenizerError
from quire.text import ChatTemplate, Tokenizer, read_chat_template
from quire.text.chat_template import as_parts, as_string, normalized

USER = {"role": "user", "content": "Hi"}
ONLY_CONTENT = "{% for m in messages %}{{ m['content'] | trim }}|{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
RECURSION = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


def parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def test_chatml_from_the_metadata(byte_level: Tokenizer) -> None:
    template = ChatTemplate(None, byte_level)
    assert template.render([USER]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert byte_level.encode(template.render([USER]))[0] == byte_level.bos_token_id


def test_missing_template_says_how_to_pass_one(sentencepiece: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"sentencepiece\.gguf has no chat template: pass one with chat_template="):
        ChatTemplate(None, sentencepiece)


def test_named_templates_without_default_are_listed(words: Tokenizer) -> None:
    templates = {"rag": "x", "tool_use": "y"}
    tokenizer = Tokenizer(words.backend, source="w", vocab_size=3, named_token_ids={}, chat_templates=templates)
    with pytest.raises(TokenizerError, match=r"several chat templates \(rag, tool_use\) and no default"):
        ChatTemplate(None, tokenizer)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_the_sandbox_holds(byte_level: Tokenizer, attack: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(TokenizerError, match=r"sandbox forbids.*chat_template="):
        ChatTemplate(attack, byte_level).render(messages)
    assert messages == [USER]


def test_raise_exception_reaches_the_user(byte_level: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", byte_level)
    with pytest.raises(BadRequestError, match="refuses these messages: roles must alternate") as caught:
        template.render([USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 3 }}", "{{ messages[0].nothing.here }}", "{{ 1 / 0 }}", "{{ x[0] }}", RECURSION],
)
def test_errors_inside_a_template_are_the_requests(byte_level: Tokenizer, template: str) -> None:
    with pytest.raises(BadRequestError, match="cannot render these messages"):
        ChatTemplate(template, byte_level).render([USER])


@pytest.mark.parametrize("template", ["{% for %}", "{{ x", "{% nonsense %}", "{{ x | no_such_filter }}"])
def test_syntax_errors_are_told_at_once(byte_level: Tokenizer, template: str) -> None:
    with pytest.raises(TokenizerError, match=r"not valid jinja2 \(line 1: .*chat_template="):
        ChatTemplate(template, byte_level)


def test_parts_become_text_where_the_template_wants_text(byte_level: Tokenizer) -> None:
    assert ChatTemplate(ONLY_CONTENT, byte_level).render([parts("a", "b")]) == "a\nb|"


def test_text_becomes_parts_where_the_template_wants_parts(byte_level: Tokenizer) -> None:
    assert ChatTemplate(PARTS, byte_level).render([USER, parts("a", "b")]) == "[Hi][a][b]"
    assert ChatTemplate(EITHER, byte_level).render([USER, parts("a", "b")]) == "Hi[a][b]"


@pytest.mark.parametrize("content", ["Sure, ", "", "Hi", "  two  "])
@pytest.mark.parametrize("template", [None, PARTS, EITHER])
def test_the_final_message_can_be_continued(byte_level: Tokenizer, template: str | None, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    text = ChatTemplate(template, byte_level).render(messages, add_generation_prompt=False, continue_final_message=True)
    begins = {None: "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", PARTS: "[Hi][", EITHER: "Hi"}[template]
    assert text == begins + content


def test_final_parts_can_be_continued(byte_level: Tokenizer) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(PARTS, byte_level).render([parts("a", "b")], **options) == "[a][b"
    assert ChatTemplate(PARTS, byte_level).render([{"role": "user", "content": []}], **options) == "["
    assert ChatTemplate(ONLY_CONTENT, byte_level).render([parts("a", "b ")], **options) == "a\nb "


def test_continuing_and_beginning_exclude_each_other(byte_level: Tokenizer) -> None:
    with pytest.raises(BadRequestError, match="set add_generation_prompt to false") as caught:
        ChatTemplate(None, byte_level).render([USER], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_template_that_drops_the_final_message_cannot_continue_it(byte_level: Tokenizer) -> None:
    with pytest.raises(BadRequestError, match="leaves out the final message"):
        ChatTemplate("x", byte_level).render([USER], add_generation_prompt=False, continue_final_message=True)


def test_tools_and_switches_pass_through(byte_level: Tokenizer) -> None:
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{{ 'thinking' if enable_thinking }}{{ bos_token }}"
    template = ChatTemplate(source, byte_level)
    tools = [{"type": "function", "function": {"name": "f", "description": "<größe>"}}]
    expected = '[{"type": "function", "function": {"name": "f", "description": "<größe>"}}]thinking<|im_start|>'
    assert template.render([USER], tools=tools, enable_thinking=True) == expected
    assert template.render([USER]) == "<|im_start|>"


def test_switches_cannot_replace_the_messages(byte_level: Tokenizer) -> None:
    with pytest.raises(BadRequestError, match="must not contain messages, strftime_now") as caught:
        ChatTemplate(None, byte_level).render([USER], messages=[], strftime_now=1)
    assert caught.value.param == "chat_template_kwargs"


def test_what_published_templates_use(byte_level: Tokenizer) -> None:
    source = (
        "{%- for i in range(9) %}\n    {%- if i == 2 %}{% break %}{% endif %}\n{{ i }}\n{%- endfor %}\n"
        "{% generation %}said{% endgeneration %} {{ strftime_now('%Y') }} {{ {'a': [1]} | tojson(indent=2) }}"
    )
    before = datetime.now().year
    text = ChatTemplate(source, byte_level).render([USER])
    expected = [f'01said {year} {{\n  "a": [\n    1\n  ]\n}}' for year in (before, before + 1)]
    assert text in expected


def test_a_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    assert read_chat_template("{{ x }}") == "{{ x }}"
    (tmp_path / "t.jinja").write_text("from a file: {{ x }}")
    assert read_chat_template(str(tmp_path / "t.jinja")) == "from a file: {{ x }}"
    with pytest.raises(TokenizerError, match="neither a template"):
        read_chat_template(str(tmp_path / "missing.jinja"))


def test_tool_calls_reach_the_template_or_are_refused(byte_level: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    calls = "{% for call in m.tool_calls or () %}{{ call.function }}{% endfor %}"
    shows = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    assert ChatTemplate(shows, byte_level).render(history) == "?{'name': 'add', 'arguments': {'x': 1}}"
    with pytest.raises(BadRequestError, match=r"messages\[1\]\.tool_calls: this model's chat template has no place"):
        ChatTemplate(ONLY_CONTENT, byte_level).render(history)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of messages, got str"),
        ({"role": "user"}, "messages must be a list"),
        ([], "messages must not be empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a string such as 'user', got None"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string or a list of text parts, got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content .* got 3"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[0\] type 'image_url' is not supported",
        ),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] str is not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string, got None"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments must be JSON",
        ),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"messages\[0\]\.tool_calls must be a list of objects"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        normalized(messages)
    assert caught.value.param == "messages"


def test_tool_calls_get_their_arguments_as_objects_and_the_callers_stay_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    original = {"role": "assistant", "content": None, "tool_calls": [call]}
    (message,) = normalized([original])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert call["function"]["arguments"] == '{"x": 1}' and original["content"] is None


def test_parts_and_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_string(parts) == "a\nb"
    assert as_parts("a") == parts[:1]
    assert as_string("a") == "a" and as_parts(parts) == parts
