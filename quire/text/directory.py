"""The tokenizer files of a model directory: tokenizer.json, tokenizer_config.json and their companions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import TokenizerError
from quire.text.pretokenize import add_ends

if TYPE_CHECKING:
    import tokenizers

_NAMES = ("bos", "eos", "pad", "unk")


class TokenizerFiles:
    """Reads a directory once; missing companions are fine, a missing tokenizer.json or a broken file is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer_json = path / "tokenizer.json"
        # The older file first: the newer one's values win.
        self.config = {**self._json("special_tokens_map.json"), **self._json("tokenizer_config.json")}

    def load(self) -> tokenizers.Tokenizer:
        from tokenizers import AddedToken, Tokenizer

        if not self.tokenizer_json.is_file():
            raise TokenizerError(self._missing())
        try:
            backend = Tokenizer.from_file(str(self.tokenizer_json))
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise TokenizerError(
                f"{self.tokenizer_json} cannot be read ({error}): "
                "expected a Hugging Face tokenizer.json; download it again"
            ) from error
        # Settings for training batches; here they would cut or stretch prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        special = self.special_tokens(backend)
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special if t not in known])
        if any(isinstance(self.config.get(key), bool) for key in ("add_bos_token", "add_eos_token")):
            ids = self.named_token_ids(backend)
            add_ends(
                backend,
                bos_token_id=ids["bos"] if self.config.get("add_bos_token") else None,
                eos_token_id=ids["eos"] if self.config.get("add_eos_token") else None,
            )
        return backend

    def named_token_ids(self, backend: tokenizers.Tokenizer) -> dict[str, int | None]:
        """Ids of bos, eos, pad and unk, None where the directory names none."""
        ids: dict[str, int | None] = {}
        for name in _NAMES:
            token = _content(self.config.get(f"{name}_token"))
            ids[name] = None if token is None else backend.token_to_id(token)
            if token is not None and ids[name] is None and name in ("bos", "eos"):
                raise TokenizerError(
                    f"{self.path}: {name}_token is {token!r}, which {self.tokenizer_json.name} does not have: "
                    "the two files belong to different models; download them again"
                )
        return ids

    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name: files of their own first, then tokenizer_config.json."""
        jinja = self.path / "chat_template.jinja"
        if jinja.is_file():
            return {"default": self._text(jinja)}
        found = self._json("chat_template.json").get("chat_template", self.config.get("chat_template"))
        if found is None:
            return {}
        if isinstance(found, str):
            return {"default": found}
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in found}
        except (TypeError, KeyError):
            raise TokenizerError(
                f"{self.path}: chat_template must be a string or a list of name and template, "
                f"got {type(found).__name__}: correct the file or pass chat_template=..."
            ) from None

    def special_tokens(self, backend: tokenizers.Tokenizer) -> list[str]:
        """The tokens that the directory names as special, as far as the vocabulary has them."""
        values = [self.config.get(f"{name}_token") for name in _NAMES]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = self.config.get(key) or []
            values += more.values() if isinstance(more, dict) else more
        named = [content for value in values if (content := _content(value))]
        return [token for token in named if backend.token_to_id(token) is not None]

    def _missing(self) -> str:
        other = next((n for n in ("tokenizer.model", "vocab.json") if (self.path / n).is_file()), None)
        what = f"{self.tokenizer_json} is missing"
        if other is None:
            return f"{what}: download it from the model's page into that directory, or pass tokenizer=DIRECTORY"
        return (
            f"{what}; {other} alone is not enough: write tokenizer.json with transformers' "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or pass tokenizer=DIRECTORY"
        )

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            return {}
        try:
            value = json.loads(self._text(file))
        except ValueError as error:
            raise TokenizerError(f"{file} is not JSON ({error}): download it again") from error
        if not isinstance(value, dict):
            raise TokenizerError(f"{file} holds a {type(value).__name__}, expected an object: download it again")
        return value

    def _text(self, file: Path) -> str:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file} cannot be read ({error}): expected UTF-8 text; download it again") from error


def _content(value: Any) -> str | None:
    """A token in these files is its text, or an object that has it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
