"""Which special tokens of a rendered chat the template wrote, and which are only text in a message.

A tokenizer sees text alone: `<|im_end|>` in a message would end the message. So the template's own special tokens are
written as marks (in its words and in bos_token and the like, before it runs), which cannot be guessed. Contents stay
as they are, for the template to trim, cut and compare. Exactly the marked tokens of the result are then special.

Some templates build tokens from pieces (`'<|' + message.role + '|>'`), which no mark finds. With those it is the
contents that are marked, in the middle of whatever looks like a special token; the rest of them is the template's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.errors import BadRequestError

if TYPE_CHECKING:
    import tokenizers

_PRIVATE = 0xF0000  # characters that Unicode gives no meaning: no template changes them, no normalizer either
_NUM_PRIVATE = 0xFFFD


class ControlTokens:
    """The special tokens of one vocabulary, and their marks."""

    def __init__(self, backend: tokenizers.Tokenizer, unk_token_id: int | None) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        # The token for unknown text controls nothing, nor do tokens of only space.
        # Byte-level models know every text: a token that is called unknown there can still be one that ends texts.
        named = None if unk_token_id is None else backend.id_to_token(unk_token_id)
        unknown = getattr(backend.model, "unk_token", named)  # a Unigram model has no such attribute
        special = {
            token.content: token_id
            for token_id, token in self._added.items()
            if token.special and token.content != unknown and not token.content.isspace()
        }
        lead = "\ufdd2" + "".join(chr(_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(4))
        self.marks = {content: lead + chr(_PRIVATE + i) for i, content in enumerate(special)}
        self._contents = [*special, ""]
        self._cut = lead + chr(_PRIVATE + len(special))  # stands for nothing, between two characters of a token
        self._ids = special
        self._id_set = frozenset(special.values())
        self._pattern = re.compile(re.escape(lead) + "(.)", re.DOTALL)

    def without_marks(self, marked: str) -> str:
        return self._pattern.sub(lambda found: self._contents[ord(found[1]) - _PRIVATE], marked)

    def are_all_marked(self, marked: str, token_ids: Sequence[int]) -> bool:
        """Whether the special tokens among these, of the text without marks, are just the marked ones."""
        found = [token_id for token_id in token_ids if token_id in self._id_set]
        contents = (self._contents[ord(mark) - _PRIVATE] for mark in self._pattern.findall(marked))
        return found == [self._ids[content] for content in contents if content]

    def cut_up(self, value: Any) -> Any:
        """A message with every special token in its text cut in two; roles stay, for templates to build with."""
        if isinstance(value, str):
            return self._replace(value, lambda token: token[0] + self._cut + token[1:])
        if isinstance(value, Mapping):
            return {key: one if key == "role" else self.cut_up(one) for key, one in value.items()}
        return [self.cut_up(one) for one in value] if isinstance(value, (list, tuple)) else value

    def mark_all(self, rendered: str) -> str:
        """The text of a template that builds its tokens, from contents that are cut up."""
        return self._replace(rendered, self.marks.__getitem__)

    def _replace(self, text: str, by: Callable[[str], str]) -> str:
        present = sorted((token for token in self.marks if token in text), key=len, reverse=True)
        if not present:
            return text
        return re.sub("|".join(map(re.escape, present)), lambda found: by(found[0]), text)

    def encode(self, marked: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids in which marks alone become special tokens."""
        backend, real_ids = self._marked_backend
        encoding = backend.encode_batch_fast([marked.replace(self._cut, "")], add_special_tokens=False)[0]
        if made_of_text := (self._id_set - real_ids.keys()).intersection(encoding.ids):
            token = self._backend.id_to_token(min(made_of_text))
            raise BadRequestError(
                f"a message holds {token!r}, and this model's tokenizer makes a control token of it even in plain "
                "text: remove it",
                param="messages",
            )
        if add_special_tokens:
            encoding = backend.post_process(encoding)
        return [real_ids.get(token_id, token_id) for token_id in encoding.ids]

    @cached_property
    def _marked_backend(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same tokenizer, with every special token under its mark, and the real ids of all added ones."""
        from tokenizers import AddedToken, Tokenizer

        copy = Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(copy, part, value)
        contents = {token_id: self.marks.get(token.content, token.content) for token_id, token in self._added.items()}
        # One by one, in the order of their ids: a later one may be part of an earlier one.
        copy.add_tokens(
            [
                AddedToken(
                    contents[token_id],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
                for token_id, token in sorted(self._added.items())
            ]
        )
        made_ids = ((copy.token_to_id(content), token_id) for token_id, content in contents.items())
        return copy, {made_id: token_id for made_id, token_id in made_ids if made_id is not None}
