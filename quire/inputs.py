"""What `generate` takes as a prompt, under the names that vLLM's users write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text. Requests share cached blocks only with those of the same `cache_salt`."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is then the text that they were made from, for the output to show."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


# A prompt: text, token ids, or a dict with one of them, such as the two above.
Prompt = str | Sequence[int] | Mapping[str, Any]
PromptType = Prompt  # vLLM's name for it
