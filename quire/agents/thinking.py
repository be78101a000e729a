"""How models mark what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ThinkingFormat:
    name: str
    begin: str
    end: str
    always_open: bool = False  # an answer begins inside a thought, though the prompt does not say so

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thought."""
        return self.always_open or prompt.rstrip().endswith(self.begin)


_THINK = ThinkingFormat("think", "<think>", "</think>")
_MISTRAL = ThinkingFormat("mistral", "[THINK]", "[/THINK]")
# vLLM's names of them.
THINKING_FORMATS = {
    **dict.fromkeys(("think", "qwen3", "glm45", "granite", "deepseek_v3", "hunyuan_a13b"), _THINK),
    "deepseek_r1": ThinkingFormat("deepseek_r1", "<think>", "</think>", always_open=True),
    "mistral": _MISTRAL,
}


def find_thinking(template: str) -> ThinkingFormat | None:
    """Only templates that write or read the closing marker: others merely mention it."""
    return next((one for one in (_THINK, _MISTRAL) if one.end in template), None)
