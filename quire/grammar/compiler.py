"""Compiling grammars: beside the loop, once for each text, within bounds of time and memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.config import EngineConfig
from quire.errors import BadRequestError
from quire.models.spec import ModelSpec
from quire.text import Tokenizer
from quire.weights import Checkpoint, open_checkpoint, resolve_model

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from quire.grammar.strings import StringMatcher, StringVocabulary

_MAX_KEPT_CHARS = 2**23  # of all grammars that are kept; compiled, each takes some ten times its text
_MAX_KEPT = 1024
_NUM_THREADS = 2  # one large grammar does not hold up the small ones
# Sets of tokens that strings in JSON take whole, by how many characters they may still have: of the rest, each token is
# looked at. The library's own sets leave most of the vocabulary to be looked at near the end of a string of bounded
# length, which takes half as long again.
_STRING_LENGTHS = (2, 4, 6, 8, 10, 14, 20, 30)
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{length}}}" for length in _STRING_LENGTHS),
    f"{_CHARACTER}+",
]
_QUICK_S = 5e-3  # what takes no longer to compile may be compiled again where a sequence begins

# What follows a text through a grammar, and what helps it inside strings, where there is any use in that.
Matchers: TypeAlias = "tuple[LLMatcher, StringMatcher | None]"


def _limits() -> LLParserLimits:
    """Fuel is the compiler's own measure of work: some 50,000 a millisecond at first, 14,000 in a step."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=40_000,
        max_lexer_states=20_000,  # about a kilobyte each, for every sequence that follows the grammar
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class CompiledGrammar:
    """Matchers at a grammar's beginning. Copies of one of them take turns at its lexer, so that threads which fill
    masks at the same time need several that were compiled apart."""

    def __init__(self, compile_one: Callable[[], Matchers], threads: ThreadPoolExecutor) -> None:
        self._compile_one = compile_one
        self._threads = threads
        started = time.thread_time()  # waiting for the interpreter is no part of it
        self._lexers = [compile_one()]
        self._is_quick = time.thread_time() - started <= _QUICK_S
        self._growing: Future[None] | None = None

    def matchers(self, lexer: int) -> Matchers:
        """Copies of the caller's own, that use this lexer, if there are as many."""
        if lexer >= len(self._lexers):
            if self._is_quick:
                self._grow()
            elif self._growing is None or self._growing.done():
                self._growing = self._threads.submit(self._grow)
        matcher, strings = self._lexers[lexer % len(self._lexers)]
        return matcher.deep_copy(), strings and strings.copy()

    def _grow(self) -> None:
        self._lexers.append(self._compile_one())


class GrammarCompiler:
    """Compiled grammars of one model, by their text. Any thread may use it."""

    def __init__(
        self, open_vocabulary: Callable[[], tuple[Tokenizer | None, Iterable[int]]], *, vocab_size: int
    ) -> None:
        """`open_vocabulary` gives the tokenizer and its end tokens. It is called by `prepare`, or for the first
        grammar."""
        self._open = open_vocabulary
        self.vocab_size = vocab_size
        self._has_strings = False
        self._kept: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()

    @classmethod
    def of_model(cls, config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> GrammarCompiler:
        """For a process that has no tokenizer otherwise."""

        def open_vocabulary() -> tuple[Tokenizer | None, Iterable[int]]:
            tokenizer = open_tokenizer(config, checkpoint, spec)
            return tokenizer, end_token_ids(checkpoint, spec, tokenizer)

        return cls(open_vocabulary, vocab_size=spec.vocab_size)

    def follow_strings(self) -> None:
        """Compile matchers for strings too, from now on: where threads fill masks, those save more than it takes to
        tell them of each token."""
        self._has_strings = True

    def prepare(self) -> None:
        """Read the vocabulary beside what else goes on, so that the first grammar need not wait for it."""
        self._threads.submit(self._read_vocabulary)

    def start(self, grammar: str) -> Future[CompiledGrammar]:
        """The compiled grammar, now or later. Its error is a BadRequestError."""
        with self._lock:
            future = self._kept.get(grammar)
            if future is not None:
                self._kept.move_to_end(grammar)
                return future
            future = self._kept[grammar] = self._threads.submit(self._compile, grammar)
            self._num_chars += len(grammar)
            while len(self._kept) > 1 and (self._num_chars > _MAX_KEPT_CHARS or len(self._kept) > _MAX_KEPT):
                oldest, _ = self._kept.popitem(last=False)
                self._num_chars -= len(oldest)
            return future

    def matchers(self, grammar: str, lexer: int = 0) -> Matchers:
        """Matchers at the grammar's beginning, of the caller's own. Waits where it is not compiled yet. lexer: only
        matchers of different ones are of use to several threads."""
        return self.start(grammar).result().matchers(lexer)

    def check(self, grammar: str) -> None:
        """Raises BadRequestError where the grammar cannot be compiled."""
        future = self.start(grammar)
        error = future.exception()
        if error is not None:
            # Each caller gets its own: a traceback would hold what the callers before it held.
            raise (
                BadRequestError(str(error), param="structured_outputs") if isinstance(error, BadRequestError) else error
            )

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="quire-grammar")

    @property
    def tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return grammar_tokenizer(self._vocabulary)

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        tokenizer, eos_token_ids = self._open()
        if tokenizer is None:
            raise _bad("needs a tokenizer, and skip_tokenizer_init=True was set")
        return _Vocabulary(tokenizer, self.vocab_size, eos_token_ids)

    @property
    def _strings(self) -> StringVocabulary:
        with self._tokenizer_lock:
            return self._string_vocabulary

    @cached_property
    def _string_vocabulary(self) -> StringVocabulary:
        from quire.grammar.strings import StringVocabulary  # numpy, which not every process has any use for

        read = self._vocabulary
        return StringVocabulary(read.tokens, read.special_token_ids, read.ends)

    def _read_vocabulary(self) -> None:
        _ = self.tokenizer
        if self._has_strings:
            _ = self._strings.tokenizer

    def _compile(self, grammar: str) -> CompiledGrammar:
        try:
            grammar.encode()
        except UnicodeEncodeError:
            raise _bad("holds a lone surrogate, which is no Unicode text: remove it") from None
        self._read_vocabulary()  # no part of what a grammar takes
        has_strings = False
        if self._has_strings:
            from quire.grammar.strings import bounds_plain_strings

            has_strings = bounds_plain_strings(grammar)
        return CompiledGrammar(lambda: self._compile_one(grammar, has_strings=has_strings), self._threads)

    def _compile_one(self, grammar: str, *, has_strings: bool) -> Matchers:
        matcher = _matcher(self.tokenizer, grammar)
        if not has_strings:
            return matcher, None
        from quire.grammar.strings import StringMatcher

        try:
            return matcher, StringMatcher(_matcher(self._strings.tokenizer, grammar), self._strings)
        except BadRequestError:  # its bytes are more tokens than the text's: it may run out of what the other needs not
            return matcher, None


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise _bad(f"cannot be compiled: {_short(matcher.get_error())}")
    matcher.compute_bitmask()  # what the first mask needs is then made once, and not for each sequence
    if matcher.is_error():
        raise _bad(f"allows no answer: {_short(matcher.get_error())}")
    return matcher


def _short(message: str) -> str:
    return " ".join(message.split())[:300]


def _bad(what: str) -> BadRequestError:
    return BadRequestError(f"structured_outputs {what}", param="structured_outputs")


def open_tokenizer(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> Tokenizer | None:
    """The tokenizer that a config names, or else the model's own."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        # Its weights are not needed.
        other = resolve_model(config.tokenizer, load_format="dummy", download_dir=config.download_dir)
        if other.suffix == ".gguf":
            tokenizer = Tokenizer.from_gguf(open_checkpoint(other).gguf_metadata or {}, source=str(other))
        else:
            tokenizer = Tokenizer.from_directory(other)
    elif checkpoint.gguf_metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata, source=str(checkpoint.path))
    else:
        tokenizer = Tokenizer.from_directory(checkpoint.path)
    tokenizer.check_fits(spec.vocab_size, source=str(checkpoint.path))
    return tokenizer


def end_token_ids(checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer | None) -> set[int]:
    """Models name their end tokens in up to three places; any of them ends a sequence."""
    ids = set(spec.eos_token_ids)
    told: Any = checkpoint.generation_config.get("eos_token_id")
    if isinstance(told, int):
        ids.add(told)
    elif isinstance(told, list):
        ids.update(told)
    if tokenizer is not None:
        ids.update(tokenizer.end_token_ids)
    return ids


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.ends = sorted(token for token in eos_token_ids if token < vocab_size)
        if not self.ends:
            raise _bad("need a model with an end token, and this one names none")
        self._tokenizer = tokenizer
        self.eos_token_id = self.ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        # Ids beyond the tokenizer's have no bytes, and a token without bytes is allowed nowhere.
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_token_ids if token < vocab_size)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def grammar_tokenizer(vocabulary: _Vocabulary) -> LLTokenizer:
    """Takes some hundred milliseconds for a large vocabulary, and holds the interpreter for half of them."""
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(vocabulary)
    return LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.ends, slices=_SLICES)
