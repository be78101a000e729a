"""A model's chat template and a message, from their text to tokens: the template, a zero byte, the message."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fuzz.harness import Target
from quire.errors import BadRequestError, TokenizerError
from quire.text import ChatTemplate, Tokenizer, chat_template
from quire.text.template_process import TemplateProcesses

_SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>"]


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_SPECIAL)
    ids = {"bos": backend.token_to_id("<s>"), "eos": backend.token_to_id("</s>")}
    return Tokenizer(backend, source="fuzzed", vocab_size=backend.get_vocab_size(), named_token_ids=ids)


_TOKENIZER = _tokenizer()
_PROCESSES = TemplateProcesses(cpu_s=0.1)


def parse(data: bytes) -> None:
    source, _, content = data.partition(b"\0")
    messages = [
        {"role": "user", "content": content.decode("utf-8", "replace")},
        {"role": "assistant", "content": "Hi", "name": "a"},
    ]
    shared, chat_template.processes = chat_template.processes, _PROCESSES
    try:
        template = ChatTemplate(source.decode("utf-8", "replace"), _TOKENIZER)
        text, token_ids = template.encode(messages, at_most=1000, bos_token="<s>", tools=[{"name": "f"}])
    finally:
        chat_template.processes = shared
    assert _TOKENIZER.decode(token_ids, skip_special_tokens=False) == text, "tokens of another text"


TARGET = Target(
    name="chat_template",
    parse=parse,
    refusals=(BadRequestError, TokenizerError),
    words=tuple(
        word.encode()
        for word in (
            *("{{ ", " }}", "{% ", " %}", "{#", "#}", "{%- ", "-%}", "\0", "'", '"', "(", ")", "[", "]", " | ", " ~ "),
            *("for m in messages", "endfor", "recursive", "break", "loop", "if ", "else", "endif", "set x = ", "."),
            *("macro f(a)", "endmacro", "f(1)", "namespace(x=1)", "range(99999)", "raise_exception('no')"),
            *("message.content", "m.role", "content", "tools", "add_generation_prompt", "bos_token", "__class__"),
            *("trim", "tojson", "join(',')", "format(1)", "center(99999)", "map('upper')", "list", "length", "* 99999"),
            *("strftime_now('%Y')", "generation", "endgeneration", *_SPECIAL),
        )
    ),
    max_input_bytes=1 << 14,
)
