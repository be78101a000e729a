"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings. Never imports torch."""

from quire.text.chat_template import ChatTemplate, read_chat_template
from quire.text.detokenizer import Detokenizer, StopMatch, StopStrings
from quire.text.hf_facade import HFTokenizerFacade
from quire.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "HFTokenizerFacade",
    "StopMatch",
    "StopStrings",
    "Tokenizer",
    "read_chat_template",
]
