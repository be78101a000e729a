"""The engine's tokenizer under the names that programs written for Hugging Face's transformers use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from quire.errors import BadRequestError
from quire.text.chat_template import ChatTemplate, read_chat_template
from quire.text.tokenizer import Tokenizer

_Options = Mapping[str, tuple[Any, ...]]

# Options that transformers has and Quire has not -> the values with which they change nothing.
_OF_BATCHES: _Options = {
    "padding": (False, "do_not_pad"),
    "truncation": (None, False, "do_not_truncate"),
    "max_length": (None,),
    "return_tensors": (None,),
}
_OF_CALLS: _Options = {
    **_OF_BATCHES,
    "text_pair": (None,),
    "stride": (0,),
    "is_split_into_words": (False,),
    "pad_to_multiple_of": (None,),
    "padding_side": (None,),
    "return_token_type_ids": (None, False),
    "return_overflowing_tokens": (False,),
    "return_special_tokens_mask": (False,),
    "return_offsets_mapping": (False,),
    "return_length": (False,),
    "verbose": (True, False),
}
_OF_DECODING: _Options = {"clean_up_tokenization_spaces": (None, False)}
_OF_CHATS: _Options = {
    **_OF_BATCHES,
    "sanitize_control_tokens": (False,),
    "return_assistant_tokens_mask": (False,),
    "tokenizer_kwargs": (None, {}),
    "content_format": (),  # the renderer's own, which a template's switch must not set
}


class TokenizedText(dict[str, Any]):
    """The result of calling the tokenizer: input_ids and attention_mask, each a list, or lists for several texts.

    Read as a mapping (`**encoded`) or by attribute, as transformers' BatchEncoding is.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a tokenized text has {' and '.join(self)}, not {name}") from None


def _of_tokenizer(name: str) -> Any:
    """A property that the tokenizer has under the same name."""
    return property(lambda self: getattr(self._tokenizer, name))


@dataclass(frozen=True, eq=False, repr=False)
class HFTokenizerFacade:
    """What `LLM.get_tokenizer()` returns. Equal to transformers' tokenizer of the same files, with its defaults:
    `decode` shows special tokens, `apply_chat_template` asks for no answer. It belongs to the engine, so nothing can
    be set on it.

    Texts are never padded, cut or made tensors: such options are refused by name.
    """

    _tokenizer: Tokenizer
    _own_template: str | None = None  # the user's, over the model's

    # -- text to tokens

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_attention_mask: bool | None = None,
        **options: Any,
    ) -> TokenizedText:
        _refuse("calling the tokenizer", options, _OF_CALLS)
        one = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        # Checked here because the library would take a list of two as a pair of texts.
        if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
            raise BadRequestError("the tokenizer takes a string or a list of strings", param="text")
        rows = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        encoded = TokenizedText(input_ids=rows[0] if one else rows)
        if return_attention_mask is not False:
            masks = [[1] * len(row) for row in rows]  # nothing is padding
            encoded["attention_mask"] = masks[0] if one else masks
        return encoded

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        _refuse("encode", options, _OF_CALLS)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        return [self._tokenizer.token(i) for i in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    # -- tokens to text

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of one row of token ids (a list, an array, a tensor), or of a single id."""
        _refuse("decode", options, _OF_DECODING)
        ids = [token_ids] if isinstance(token_ids, Integral) else _row(token_ids)
        return self._tokenizer.decode(_checked(ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        _refuse("batch_decode", options, _OF_DECODING)
        rows = [_checked(_row(row)) for row in sequences]
        return [self._tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    # -- tokens and their ids

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> str | list[str | None] | None:
        """Tokens as the vocabulary writes them (`Ġthe`); None where no token has the id."""
        if isinstance(ids, Integral):
            return self._tokenizer.token(int(ids)) or None
        hidden = frozenset(self.all_special_ids) if skip_special_tokens else frozenset[int]()
        return [self._tokenizer.token(i) or None for i in _checked(_row(ids)) if i not in hidden]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Ids of tokens. Text that is no token has the unknown token's id, or None where there is no such token."""
        return self._id_of(tokens) if isinstance(tokens, str) else [self._id_of(token) for token in tokens]

    def _id_of(self, token: str) -> int | None:
        token_id = self._tokenizer.backend.token_to_id(token)
        return self._tokenizer.unk_token_id if token_id is None else token_id

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        """The number of tokens, added ones included."""
        return self._tokenizer.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones."""
        return self._tokenizer.backend.get_vocab_size(with_added_tokens=False)

    # -- special tokens

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """The special tokens that the model's files name as such. Its vocabulary may have more, which decoding can skip
        too."""
        named = (self.bos_token, self.eos_token, self.unk_token, self.pad_token)
        found = dict.fromkeys((*named, *self._tokenizer.listed_special_tokens))
        return [token for token in found if token is not None]

    @cached_property
    def all_special_ids(self) -> list[int]:
        ids = map(self._tokenizer.backend.token_to_id, self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    bos_token, bos_token_id = _of_tokenizer("bos_token"), _of_tokenizer("bos_token_id")
    eos_token, eos_token_id = _of_tokenizer("eos_token"), _of_tokenizer("eos_token_id")
    pad_token, pad_token_id = _of_tokenizer("pad_token"), _of_tokenizer("pad_token_id")
    unk_token, unk_token_id = _of_tokenizer("unk_token"), _of_tokenizer("unk_token_id")

    # -- chats

    @property
    def chat_template(self) -> str | None:
        """The one that `LLM.chat` renders with; None where there is none."""
        return self._tokenizer.chat_template if self._own_template is None else self._own_template

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **switches: Any,
    ) -> Any:
        """A conversation, or a list of them, as the template writes it.

        With `tokenize` the ids as calling the tokenizer gives them, without `return_dict` the ids alone; else text.
        `chat_template` is a template, a file that holds one, or the name of one of the model's. `switches` are the
        template's own.
        """
        _refuse("apply_chat_template", switches, _OF_CHATS, others_are_known=True)
        if not isinstance(continue_final_message, bool):
            raise BadRequestError(
                f"continue_final_message must be True or False, got {continue_final_message!r}: the message's content "
                "is what can be continued",
                param="continue_final_message",
            )
        template = self._template(chat_template)
        _check_tools(tools, template)
        options = {name: value for name, value in switches.items() if name not in _OF_CHATS} | {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools or None,
        }
        rendered: str | list[str]
        if isinstance(conversation, Sequence) and conversation and isinstance(conversation[0], (list, tuple)):
            rendered = [template.render(one, **options) for one in conversation]
        else:
            rendered = template.render(conversation, **options)
        if not tokenize:
            return rendered
        encoded = self(rendered, add_special_tokens=False)  # the template writes those itself
        return encoded if return_dict else encoded.input_ids

    def _template(self, given: str | None) -> ChatTemplate:
        if given is None:
            return self._default_template
        named = self._tokenizer.chat_templates.get(given)
        return ChatTemplate(read_chat_template(given) if named is None else named, self._tokenizer)

    @cached_property
    def _default_template(self) -> ChatTemplate:
        return ChatTemplate(self._own_template, self._tokenizer)


def _refuse(where: str, options: Mapping[str, Any], harmless: _Options, *, others_are_known: bool = False) -> None:
    for name, value in options.items():
        if name not in harmless:
            if others_are_known:
                continue
            raise BadRequestError(f"{where}: there is no option {name!r}: leave it out", param=name)
        if not any(type(value) is type(one) and value == one for one in harmless[name]):
            raise BadRequestError(f"{where}: {name}={value!r} is not supported by Quire: leave it out", param=name)


def _check_tools(tools: Any, template: ChatTemplate) -> None:
    if not tools:
        return
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRequestError("tools must be a list of JSON schemas (functions are not read)", param="tools")
    if "tools" not in template.source:
        raise BadRequestError(
            "the chat template never mentions tools, so the model would not hear of them: leave them out, or describe "
            "them in a message",
            param="tools",
        )


def _row(token_ids: Any) -> list[Any]:
    """One row of ids from a list, numpy's array or torch's tensor."""
    values = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise BadRequestError(f"expected a row of token ids, got {type(token_ids).__name__}", param="token_ids")
    return list(values)


def _checked(token_ids: list[Any]) -> list[int]:
    for token_id in token_ids:
        if not isinstance(token_id, Integral) or token_id < 0:
            hint = " (batch_decode takes several rows)" if isinstance(token_id, Sequence) else ""
            raise BadRequestError(f"token ids are whole numbers >= 0, got {token_id!r}{hint}", param="token_ids")
    return [int(token_id) for token_id in token_ids]
