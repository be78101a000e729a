"""From what a user hands in to a checked Request."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any

from quire.agents import ThinkingFormat
from quire.beams import BeamSearchParams
from quire.engine.api import PreparedRequest
from quire.errors import BadRequestError, ConfigError
from quire.grammar import GrammarCompiler, lower
from quire.inputs import Prompt
from quire.models.spec import PoolerSpec
from quire.params import (
    MAX_CACHE_SALT_CHARS,
    MAX_PRIORITY,
    MIN_PRIORITY,
    OutputKind,
    SamplingParams,
    SamplingSpec,
    ThinkingSpec,
    plain,
    plain_list,
)
from quire.pooling import PoolingKind, PoolingParams, PoolingSpec, PoolingTask
from quire.refusals import CALL, sift
from quire.request import AdapterRef, Request, cache_scope
from quire.structured import StructuredOutputsParams
from quire.text import Tokenizer

# All bad words in all their spellings: every step compares as many tokens with each sequence's last ones.
MAX_BAD_WORD_TOKENS = 16_384
_NUM_KEPT_LISTS = 32
# Fields that a SamplingSpec takes from SamplingParams unchanged.
_SPEC_FIELDS = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("logprobs", "prompt_logprobs", "extra_args"),
)
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_IS_CHAT = "is_chat"  # a key of prompts that a chat template made
SECOND_TEXT = "second_text"  # a key of prompts that are pairs, for models that score them
_NO_TEXT = SamplingParams(max_tokens=1, detokenize=False, output_kind=OutputKind.FINAL_ONLY)  # of a request that pools


@dataclass(eq=False)
class InputProcessor:
    """Tokenizes, checks against the model's limits, resolves strings to token ids and seeds to numbers."""

    tokenizer: Tokenizer | None
    _: KW_ONLY
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    seed: int
    max_num_seqs: int | None = None  # if known here: requests for more are refused before they cost
    has_plugins: bool = False  # logits processors of the engine
    is_split: bool = False  # the model, among ranks
    nondeterminism: str | None = None  # why none can be, if so
    grammars: GrammarCompiler | None = None
    thinking: ThinkingFormat | None = None
    pooler: PoolerSpec | None = None
    hidden_size: int = 0

    def __post_init__(self) -> None:
        # An application sends the same bad words with every request, and to tokenize many takes milliseconds.
        self._bad_words = lru_cache(_NUM_KEPT_LISTS)(self._tokenize_bad_words)
        self._lowered = lru_cache(_NUM_KEPT_LISTS)(lambda text: lower(StructuredOutputsParams.from_json(text)))
        self._seeds = random.Random(self.seed)  # for requests that bring none: a run repeats when its requests do

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        arrival_s: float,
        priority: int = 0,
        tenant: str = "",
        cache_tenant: str = "",
        adapter: AdapterRef | None = None,
    ) -> PreparedRequest:
        """Raises BadRequestError.

        `cache_tenant`: the tenant whose cached prefixes it may find, where tenants do not share them.
        """
        if isinstance(params, PoolingParams):
            request, text = self._pooled_request(request_id, prompt, params)
            request.priority, request.arrival_s, request.tenant = self._priority(priority), arrival_s, tenant
            request.salt = cache_scope(request.salt, cache_tenant)
            request.check_limits(self.max_model_len, self.max_num_seqs)
            return PreparedRequest(request, _NO_TEXT, text)
        if self.pooler is not None:
            raise BadRequestError(
                "this model pools and generates no text: use LLM.embed, .score, .classify or .encode, or over HTTP "
                "/v1/embeddings, /v1/rerank, /score, /classify or /pooling",
                param="prompt",
            )
        beams = None
        if isinstance(params, BeamSearchParams):
            beams, params = params.to_spec(), params.to_sampling()
        text, token_ids, salt = self.read_prompt(prompt)
        self._check_tokens(token_ids, "prompt")
        self._check_params(params)
        self._check_processors(params, beams is not None)
        if params.deterministic and self.nondeterminism is not None:
            raise BadRequestError(f"deterministic: {self.nondeterminism}. Leave it out", param="deterministic")
        room = self.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = frozenset(params.stop_token_ids or ())
        eos_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            end_token_ids=eos_ids | stop_ids,
            eos_token_ids=eos_ids - stop_ids,
            spec=self._spec(params, eos_ids | stop_ids, self._thinking(params, prompt, text, token_ids)),
            n=params.n,
            beams=beams,
            priority=self._priority(priority),
            arrival_s=arrival_s,
            salt=cache_scope(salt, cache_tenant),
            tenant=tenant,
            adapter=None if adapter is None else adapter.key,
            adapter_path="" if adapter is None else adapter.path,
            # Logprobs of cached prompt tokens are not kept, so the prompt has to run.
            skip_prefix_cache_read=bool(params.skip_reading_prefix_cache) or params.prompt_logprobs is not None,
        )
        request.check_limits(self.max_model_len, self.max_num_seqs)
        if beams is not None and (2 + len(request.end_token_ids)) * request.n > self.vocab_size:
            raise BadRequestError(
                f"beam_width={request.n} is too much for a vocabulary of {self.vocab_size} tokens: lower it",
                param="beam_width",
            )
        return PreparedRequest(request, params, text)

    def _priority(self, given: Any) -> int:
        priority = plain(given)
        if type(priority) is not int or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise BadRequestError(
                f"priority must be a whole number between {MIN_PRIORITY} and {MAX_PRIORITY}, got {priority!r}",
                param="priority",
            )
        return priority

    def _pooled_request(self, request_id: str, prompt: Prompt, params: PoolingParams) -> tuple[Request, str | None]:
        spec = pooling_spec(params, self.pooler, self.hidden_size)
        keep = params.truncate_prompt_tokens
        if keep is not None:
            if keep > self.max_model_len:
                raise BadRequestError(
                    f"truncate_prompt_tokens={keep} is more than the {self.max_model_len} tokens that fit: lower it",
                    param="truncate_prompt_tokens",
                )
            keep = self.max_model_len if keep == -1 else keep
        num_first = None
        text, given, salt = self._parts_of(prompt)
        if given is None and text is not None and self.tokenizer is not None:
            second = prompt.get(SECOND_TEXT) if isinstance(prompt, Mapping) else None
            token_ids, num_first = self.tokenizer.encode_whole(text, second, at_most=self.max_model_len, keep=keep)
        else:
            token_ids = (self.encode(text or "") if given is None else given)[:keep]
        self._check_tokens(token_ids, "prompt")
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_tokens=1,  # it ends where a first token would be
            end_token_ids=frozenset(),
            pooling=replace(spec, num_first_tokens=num_first),
            salt=salt,
            # The states of cached tokens are not kept: only the last token's has to be computed in any case.
            skip_prefix_cache_read=bool(params.skip_reading_prefix_cache) or spec.kind is not PoolingKind.LAST,
        )
        return request, text

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, salt)."""
        text, token_ids, salt = self._parts_of(prompt)
        return text, self.encode(text or "") if token_ids is None else token_ids, salt

    def _parts_of(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
        """(text, token ids, salt) as given. Without ids there is a text; with both, it is what they were made of."""
        salt = None
        given: Any = prompt
        if isinstance(prompt, Mapping):
            salt = self._salt(prompt)
            text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is None and given is None:
                raise BadRequestError("a prompt dict needs prompt or prompt_token_ids", param="prompt")
            if given is not None:
                return text, _token_list(given), salt
            given = text
        return (given, None, salt) if isinstance(given, str) else (None, _token_list(given), salt)

    def _salt(self, prompt: Mapping[str, Any]) -> str | None:
        """The cache salt of a prompt dict. Its keys are checked on the way."""
        sift(prompt, CALL, _PROMPT_KEYS | {_IS_CHAT, SECOND_TEXT}, error=_about_key)
        salt = prompt.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise BadRequestError("cache_salt must be a non-empty text", param="cache_salt")
        if salt is not None and len(salt) > MAX_CACHE_SALT_CHARS:
            raise BadRequestError(
                f"cache_salt may have {MAX_CACHE_SALT_CHARS:,} characters, and has {len(salt):,}: send its hash",
                param="cache_salt",
            )
        return salt

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise BadRequestError(
                "this engine was made with skip_tokenizer_init=True: give prompt_token_ids", param="prompt"
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, at_most=self.max_model_len)

    def encode_pinned(self, prefixes: Iterable[str | Seq[int]], block_size: int) -> list[list[int]]:
        """The tokens of prefixes that the config names. One that fills no block would be kept in vain."""
        found = []
        for index, prefix in enumerate(prefixes):
            token_ids = self.encode(prefix) if isinstance(prefix, str) else list(prefix)
            name = f"pinned_prefixes[{index}]"
            self._check_tokens(token_ids, name)
            if len(token_ids) < block_size:
                raise ConfigError(
                    f"{name} has {len(token_ids)} tokens, and only whole blocks of {block_size} are shared: make it "
                    f"longer, or leave it out"
                )
            found.append(token_ids)
        return found

    def _check_tokens(self, token_ids: list[int], param: str) -> None:
        if not token_ids:
            raise BadRequestError(f"{param} has no tokens: give at least one", param=param)
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise BadRequestError(
                    f"{param} holds {token!r}, and token ids are whole numbers from 0 to {self.vocab_size - 1}",
                    param=param,
                )

    def _check_processors(self, params: SamplingParams, is_search: bool) -> None:
        if params.extra_args and not self.has_plugins:
            raise BadRequestError(
                "extra_args are for logits processors of the engine, and this one has none: leave them out, or make it "
                "with logits_processors",
                param="extra_args",
            )
        if params.logits_processors and self.is_split:
            raise BadRequestError(
                "logits_processors are code, which does not travel to the ranks of a split model: leave them out",
                param="logits_processors",
            )
        if is_search and self.has_plugins:
            raise BadRequestError(
                "this engine has logits processors, and beam search runs none: make one without", param="beam_width"
            )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            largest = max(getattr(params, name) or (), default=0)
            if largest >= self.vocab_size:
                raise BadRequestError(
                    f"{name} holds {largest}, and the vocabulary ends at {self.vocab_size - 1}", param=name
                )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > self.vocab_size:
                raise BadRequestError(
                    f"{name}={wanted} is more than the vocabulary's {self.vocab_size}: use -1 for all of it", param=name
                )
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise BadRequestError(f"{name} needs a tokenizer, and skip_tokenizer_init=True was set", param=name)

    def _spec(
        self, params: SamplingParams, end_token_ids: frozenset[int], thinking: ThinkingSpec | None
    ) -> SamplingSpec:
        bad_words = self._bad_words(tuple(params.bad_words or ()))
        self._check_some_token_is_left(params, end_token_ids, bad_words)
        allowed = params.allowed_token_ids
        assert allowed is None or isinstance(allowed, array)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed & (2**64 - 1)
        return SamplingSpec(
            **{name: getattr(params, name) for name in _SPEC_FIELDS},
            top_k=min(params.top_k, self.vocab_size),  # vocab_size is all of it: a larger number means no more
            seed=seed,
            min_tokens=min(params.min_tokens, self.max_model_len),
            end_token_ids=tuple(sorted(end_token_ids)),
            allowed_token_ids=allowed,
            bad_words=bad_words,
            logits_processors=tuple(params.logits_processors or ()),
            grammar=self._grammar(params),
            thinking=thinking,
        )

    def _thinking(
        self, params: SamplingParams, prompt: Prompt, text: str | None, token_ids: list[int]
    ) -> ThinkingSpec | None:
        """How the executor finds the end of a thought before the answer, for a grammar that waits for it or a budget
        that closes it; None if neither is asked for."""
        form, budget, tokenizer = self.thinking, params.thinking_token_budget, self.tokenizer
        if form is None or tokenizer is None:
            if budget is not None:
                raise BadRequestError(
                    "thinking_token_budget: this model marks no thoughts. Leave it out, or set reasoning_parser",
                    param="thinking_token_budget",
                )
            return None
        if budget is None and params.structured_outputs is None:
            return None
        tail = tokenizer.decode(token_ids[-32:], skip_special_tokens=False) if text is None else text[-128:]
        is_chat = isinstance(prompt, Mapping) and bool(prompt.get(_IS_CHAT))
        is_open = tail.rstrip().endswith(form.begin) or (form.always_open and is_chat)
        if not is_open and (not is_chat or tail.rstrip().endswith(form.end)):
            return None  # nothing is thought in this answer

        def ids_of(marker: str) -> list[int]:
            return tokenizer.encode(marker, add_special_tokens=False)

        begin, end = ids_of(form.begin), ids_of(form.end)
        return ThinkingSpec(
            is_open=is_open,
            begin=form.begin,
            end=form.end,
            begin_id=begin[0] if len(begin) == 1 else None,
            end_id=end[0] if len(end) == 1 else None,
            closing_ids=tuple(ids_of(f"\n{form.end}\n\n")),
            budget=budget,
        )

    def _grammar(self, params: SamplingParams) -> str | None:
        """The grammar, compiled here to check it: the executor can use it, and the user hears at once of a bad one."""
        if params.structured_outputs is None:
            return None
        if self.grammars is None or self.tokenizer is None:
            raise BadRequestError(
                "structured_outputs need a tokenizer, and skip_tokenizer_init=True was set", param="structured_outputs"
            )
        grammar = self._lowered(params.structured_outputs.to_json())
        self.grammars.check(grammar)
        return grammar

    def _tokenize_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The token ids of all spellings, but for those that are longer than any sequence can be."""
        found: list[tuple[int, ...]] = []
        num_tokens = 0
        for word in words:
            assert self.tokenizer is not None
            spellings = self.tokenizer.ids_for_phrase(word)
            num_tokens += sum(map(len, spellings))
            if num_tokens > MAX_BAD_WORD_TOKENS:
                raise BadRequestError(
                    f"bad_words have more than {MAX_BAD_WORD_TOKENS:,} tokens together (each word counts with and "
                    f"without a space before it): send fewer or shorter ones",
                    param="bad_words",
                )
            found.extend(ids for ids in spellings if len(ids) <= self.max_model_len)
        return tuple(dict.fromkeys(found))

    def _check_some_token_is_left(
        self, params: SamplingParams, end_token_ids: frozenset[int], bad_words: tuple[tuple[int, ...], ...]
    ) -> None:
        """Refuse what bans every first token. Later ones depend on what was sampled: those are seen when it is."""
        banned = {word[0]: "bad_words" for word in bad_words if len(word) == 1}
        if params.min_tokens:
            banned |= dict.fromkeys(end_token_ids, "min_tokens")
        given = params.allowed_token_ids
        allowed: Collection[int] = range(self.vocab_size) if given is None else given
        # Most requests ban a few tokens of very many: then there is nothing to look up.
        if any(token not in banned for token in allowed):
            return
        names = ["allowed_token_ids"] if given is not None else []
        names.extend(dict.fromkeys(banned[token] for token in allowed))
        hint = ""
        if "min_tokens" in names:
            hint = f" (before min_tokens={params.min_tokens} no end token and none of stop_token_ids is sampled)"
        raise BadRequestError(f"{' and '.join(names)} leave no token to sample{hint}: change them", param=names[0])


def pooling_spec(params: PoolingParams, pooler: PoolerSpec | None, hidden_size: int) -> PoolingSpec:
    """How a model pools under these parameters. Raises BadRequestError if it cannot."""
    if pooler is None:
        raise BadRequestError(
            "this engine generates text: make it with runner='pooling' (quire serve --runner pooling) to embed with "
            "this model, or use one that was made to embed or to classify",
            param="task",
        )
    task = params.task or (PoolingTask.CLASSIFY if pooler.labels else PoolingTask.EMBED)
    assert isinstance(task, PoolingTask)
    if task.has_classes != bool(pooler.labels):
        can = "classifies, and gives no embeddings: set convert='embed', or use LLM.classify and .score"
        cannot = "embeds, and has no classes: use LLM.embed, .score or .encode, or a model with a classifier"
        raise BadRequestError(f"this model {can if pooler.labels else cannot}", param="task")
    number = params.dimensions
    if number is not None and task is not PoolingTask.EMBED:
        raise BadRequestError(
            f"dimensions are those of an embedding, not of {task}: leave them out", param="dimensions"
        )
    if number is not None and pooler.dimensions is None:
        raise BadRequestError(
            "dimensions: this model is not known to be trained for shorter embeddings (matryoshka): leave them out, or "
            "make the engine with hf_overrides={'is_matryoshka': True}",
            param="dimensions",
        )
    allowed = pooler.dimensions or range(1, hidden_size + 1)
    if number is not None and number not in allowed:
        which = ", ".join(map(str, allowed)) if pooler.dimensions else f"1 to {hidden_size}"
        raise BadRequestError(f"dimensions={number}: this model has {which}", param="dimensions")
    is_activated = params.use_activation
    if is_activated is None:
        is_activated = True if task.has_classes else pooler.normalizes
    return PoolingSpec(
        kind=PoolingKind.ALL if task.is_by_token else pooler.kind,
        has_classes=task.has_classes,
        is_activated=is_activated,
        dimensions=number,
    )


def _token_list(given: Any) -> list[int]:
    token_ids = plain_list(given)
    if token_ids is None:
        raise BadRequestError(f"a prompt is text or a row of token ids, got {given!r:.100}", param="prompt")
    return token_ids


def _about_key(name: str, message: str) -> BadRequestError:
    return BadRequestError(f"a prompt dict may hold {', '.join(sorted(_PROMPT_KEYS))}: {message}", param="prompt")
