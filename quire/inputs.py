"""What `generate` takes as a prompt, under the names that vLLM's users write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from quire.errors import BadRequestError
from quire.params import plain, plain_list


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


def as_batch(prompts: Any) -> list[Prompt]:
    """One prompt or many? Text, a dict, and a list of numbers are one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    batch = plain_list(prompts)  # of an array of numpy's or a tensor, a row is a prompt
    if batch is None:
        raise BadRequestError(
            f"prompts must be text, token ids, a dict or a list of these, got {type(prompts).__name__}", param="prompts"
        )
    return [batch] if batch and isinstance(batch[0], int) else batch


def per_prompt(value: Any, count: int, name: str, kind: type, *, optional: bool = False) -> list[Any]:
    """optional: some prompts may have none."""
    value = plain(value)
    if value is None or isinstance(value, kind):
        return [value] * count
    values = plain_list(value)
    if values is None or any(not isinstance(v, kind) and not (optional and v is None) for v in values):
        raise BadRequestError(f"{name} must be a {kind.__name__} or a list of them", param=name)
    if len(values) != count:
        raise BadRequestError(
            f"{name} has {len(values)} entries for {count} prompts: give one, or one each", param=name
        )
    return values
