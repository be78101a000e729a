"""Drafts out of text that was there before: in the request itself (ngram), and in earlier answers too (suffix)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.drafting.acceptance import Candidate, Chances, Record, can_pay, choose
from quire.drafting.history import END_OF_ANSWER, AnswerCache, History, Match
from quire.request import Sequence
from quire.scheduler import Drafter
from quire.speculation import SpeculativeConfig
from quire.step_costs import StepCosts

_SUFFIX_GRAM = 2  # the shortest match that suffix looks for
_MIN_CHANCE = 0.02  # of an ngram's draft: none so unlikely was ever worth its time
_LOST = 64  # tokens that came while nothing was guessed: their guess is not compared with them
_LOOK_SHARE = 0.01  # of a step's time that looking in vain may take
_MAX_REST = 32  # steps without a look


@dataclass(slots=True)
class _Line:
    """One sequence's guess: it goes on as `source` does from `position` on, with which `num_agreed` tokens agreed."""

    history: History
    num_seen: int  # tokens of the sequence that the guess was compared with
    record: Record = field(default_factory=Record)
    source: list[int] | None = None
    position: int = 0
    num_agreed: int = 0
    is_unanimous: bool = True

    def guess(self, most: int) -> list[int]:
        """The next tokens. Where the sequence repeats itself, the guess comes to its end and goes round."""
        assert self.source is not None
        tokens = self.source[self.position : self.position + most]
        if self.source is self.history.tokens:
            while len(tokens) < most:
                tokens += tokens[: most - len(tokens)]
        return tokens


class LookupDrafter(Drafter):
    """Guesses that a sequence goes on as it, or an earlier answer, went on where its last tokens stood before.

    A step asks twice: `begin_step` looks at all running sequences and chooses how many drafts each gets, `propose`
    hands them out.
    """

    def __init__(self, config: SpeculativeConfig, costs: StepCosts) -> None:
        self._costs = costs
        self._most = config.num_speculative_tokens
        self._chances = Chances()
        self._lines: dict[int, _Line] = {}  # by seq_id
        self._chosen: dict[int, list[int]] = {}  # by seq_id: this step's drafts
        self._num_rests = 0  # steps until the next look
        self._is_suffix = config.method == "suffix"
        self._answers: AnswerCache | None = None
        if self._is_suffix:
            self._gram, self._depth = _SUFFIX_GRAM, config.suffix_decoding_max_tree_depth
            self._factor, self._min_chance = (
                config.suffix_decoding_max_spec_factor,
                config.suffix_decoding_min_token_prob,
            )
            if config.suffix_decoding_max_cached_requests:
                self._answers = AnswerCache(self._gram, config.suffix_decoding_max_cached_requests)
        else:
            self._gram, self._depth = config.prompt_lookup_min, config.prompt_lookup_max
            self._factor, self._min_chance = float(self._most), _MIN_CHANCE

    # -- the scheduler's side

    def begin_step(self, running: Iterable[Sequence], most: int) -> None:
        """Choose the step's drafts, `most` of them at most. Where there were none, the next look is so many steps away
        that looking stays cheap: at hundreds of sequences a look takes milliseconds."""
        self._chosen.clear()
        if self._num_rests:
            self._num_rests -= 1
            return
        started = time.thread_time()
        num_decodes = self._choose(running, most)
        if num_decodes and not self._chosen and (plain_s := self._costs.plain_s(num_decodes)):
            looked_s = time.thread_time() - started
            self._num_rests = min(_MAX_REST, int(looked_s / (_LOOK_SHARE * plain_s)))

    def _choose(self, running: Iterable[Sequence], most: int) -> int:
        """-> how many sequences decode."""
        decoding = [
            seq for seq in running if seq.num_computed_tokens == len(seq.token_ids) + seq.num_pending_tokens - 1
        ]
        if most <= 0 or not decoding or not can_pay(self._costs, len(decoding), min(most, len(decoding) * self._most)):
            return len(decoding)
        candidates = []
        by_key = {}
        for seq in decoding:
            line = self._follow(seq)
            if line.source is not None and (chances := self._reach(seq, line)):
                candidates.append(Candidate(seq.seq_id, chances))
                by_key[seq.seq_id] = (seq, line)
        for key, number in choose(self._costs, len(decoding), candidates, most).items():
            seq, line = by_key[key]
            first = _num_unknown(seq)
            self._chosen[key] = line.guess(first + number)[first:]
        return len(decoding)

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return self._chosen.pop(seq.seq_id, [])[:most]

    def ended(self, seq: Sequence) -> None:
        """Its answer is remembered, its guess forgotten."""
        self._lines.pop(seq.seq_id, None)
        self._chosen.pop(seq.seq_id, None)
        if self._answers is not None:
            self._answers.add(_scope(seq), seq.output_token_ids)

    # -- one sequence

    def _follow(self, seq: Sequence) -> _Line:
        """Compare the guess with what has come since, and look for another where it was wrong."""
        tokens = seq.token_ids
        line = self._lines.get(seq.seq_id)
        if line is None:
            line = self._lines[seq.seq_id] = _Line(History(tokens, self._gram), len(tokens))
        assert line.history.tokens is tokens
        num_tokens = len(tokens)
        if num_tokens == line.num_seen and line.source is not None:
            return line  # nothing has come: it is in flight
        line.history.extend()
        if num_tokens - line.num_seen > _LOST:
            line.source = None
        else:
            for i in range(line.num_seen, num_tokens):
                self._compare(line, tokens[i])
        line.num_seen = num_tokens
        if line.source is None and (match := self._find(seq, line)) is not None:
            line.source, line.position, line.num_agreed, line.is_unanimous = match
        return line

    def _compare(self, line: _Line, token: int) -> None:
        if line.source is None:
            return
        guess = line.source[line.position] if line.position < len(line.source) else -1
        if guess < 0:  # where the earlier answer ended
            line.source = None
            return
        is_right = guess == token
        line.record.learn(self._chances.learn(line.num_agreed, line.is_unanimous, is_right), is_right)
        if is_right:
            line.position += 1
            line.num_agreed += 1
        else:
            line.source = None

    def _find(self, seq: Sequence, line: _Line) -> Match | None:
        match = line.history.find(seq.token_ids, self._depth)
        if self._answers is not None and not seq.request.skip_prefix_cache_read:
            other = self._answers.find(_scope(seq), seq.token_ids, self._depth)
            if match is None or (other is not None and other.length > match.length):
                return other
        return match

    def _reach(self, seq: Sequence, line: _Line) -> list[float]:
        """The chance that each token after those in flight is reached and right. As long as adaptive length allows."""
        num_unknown = _num_unknown(seq)
        most = min(self._most, max(1, int(self._factor * line.num_agreed)))
        assert line.source is not None
        if line.source is not line.history.tokens:  # an earlier answer, which may end before that
            guess = line.source[line.position : line.position + num_unknown + most]
            most = (guess.index(END_OF_ANSWER) if END_OF_ANSWER in guess else len(guess)) - num_unknown
        ratio = line.record.ratio
        chances = self._chances.reach(line.num_agreed, line.is_unanimous, ratio, num_unknown + most, self._min_chance)
        return chances[num_unknown:]


def _num_unknown(seq: Sequence) -> int:
    """Tokens that steps in flight will bring, were all their drafts right. The guess is taken to be right so far: only
    what comes after it can still be drafted."""
    return seq.num_pending_tokens + seq.num_unverified_drafts


def _scope(seq: Sequence) -> tuple[str | None, str | None]:
    return seq.request.salt, seq.request.adapter
