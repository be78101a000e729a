"""From sequence updates to RequestOutputs: text, stop strings, logprobs, timings."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.api import PreparedRequest
from quire.errors import BadRequestError
from quire.outputs import CompletionOutput, LogprobList, RequestMetrics, RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.pooling import Pooled
from quire.request import FinishReason, Sequence
from quire.scheduler import SequenceUpdate
from quire.text import Detokenizer, StopStrings, Tokenizer


@dataclass(slots=True, eq=False)
class Line:
    """One sequence: the updates that wait to be shown, and the text and tokens that are shown so far.

    `seq` is the scheduler's own, or mirrors one in another thread or process: its times and counts, without tokens.
    """

    seq: Sequence
    detokenizer: Detokenizer | None
    stops: StopStrings | None
    waiting: SequenceUpdate  # whatever has come since `take`
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobList | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    pooled: Pooled | None = None
    num_sent_tokens: int = 0

    def take(self) -> SequenceUpdate | None:
        """Everything that waits, as one update; None where there is nothing."""
        update = self.waiting
        if not update.new_token_ids and not update.finished and update.prompt_logprobs is None:
            return None
        self.waiting = SequenceUpdate(self.seq, [])
        return update


class Job:
    """A request whose end has not been told yet."""

    __slots__ = ("lines", "params", "prompt", "prompt_logprobs", "request", "text_at_end")

    def __init__(self, prepared: PreparedRequest) -> None:
        self.request = prepared.request
        self.params = params = prepared.params
        self.prompt = prepared.prompt
        self.lines: dict[int, Line] = {}  # by index; forks come when they are first heard of
        self.prompt_logprobs: LogprobList | None = None
        # The text is wanted at the end only, so it is made there, in one go.
        self.text_at_end = params.output_kind is OutputKind.FINAL_ONLY and not params.stop


class OutputProcessor:
    """Holds the text side of every running request."""

    def __init__(self, tokenizer: Tokenizer | None, *, cached_block_size: int | None) -> None:
        self.tokenizer = tokenizer
        self.cached_block_size = cached_block_size  # None: prefix caching is off
        self._jobs: dict[str, Job] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Raises BadRequestError where another request has its id."""
        request_id = job.request.request_id
        if request_id in self._jobs:
            raise BadRequestError(f"request id {request_id!r} is in use: choose another", param="request_id")
        self.begin_prompt_logprobs(job)
        self._jobs[request_id] = job

    def begin_prompt_logprobs(self, job: Job) -> None:
        """Forget what came of them: the prompt is computed from its beginning."""
        if job.params.prompt_logprobs is not None:
            job.prompt_logprobs = LogprobList(self._token_text, [None])  # nothing predicts the first token

    def discard(self, request_id: str) -> None:
        """Forget a request whose reader is gone."""
        self._jobs.pop(request_id, None)

    def process(self, updates: list[SequenceUpdate]) -> tuple[list[RequestOutput], list[tuple[Sequence, str]]]:
        """The outputs for users, and the sequences that a stop string ended (for the scheduler to let go)."""
        touched: dict[str, Job] = {}
        stopped: list[tuple[Sequence, str]] = []
        for update in updates:
            job = self._jobs.get(update.seq.request.request_id)
            if job is None:
                continue  # told already: a stop string or an abort ended it, and this is a late token
            line = job.lines.get(update.seq.index) or self.add_line(job, update.seq)
            if line.finish_reason is not None:
                continue
            if self._take(job, line, update):
                assert isinstance(line.stop_reason, str)
                update.seq.finished_s = update.seq.last_token_s  # the scheduler hears of it only after this
                stopped.append((update.seq, line.stop_reason))
            touched[job.request.request_id] = job
        outputs = [output for job in touched.values() if (output := self._output(job)) is not None]
        return outputs, stopped

    def add_line(self, job: Job, seq: Sequence) -> Line:
        params = job.params
        detokenizer = stops = None
        if params.detokenize and self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                prompt_token_ids=job.request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.stop:
                stops = StopStrings(list(params.stop), include_in_output=params.include_stop_str_in_output)
        line = job.lines[seq.index] = Line(seq, detokenizer, stops, SequenceUpdate(seq, []))
        if params.logprobs is not None:
            line.logprobs, line.cumulative_logprob = LogprobList(self._token_text), 0.0
        return line

    def _take(self, job: Job, line: Line, update: SequenceUpdate) -> bool:
        """Add an update to a line. True when a stop string ends it now."""
        if update.prompt_logprobs and job.prompt_logprobs is not None:
            job.prompt_logprobs.extend(update.prompt_logprobs)
        num_new = len(update.new_token_ids)
        num_hidden = int(num_new > 0 and update.finished and _is_stop_token(update.seq, job.params))
        for i, token in enumerate(update.new_token_ids):
            line.token_ids.append(token)
            if line.logprobs is not None and update.logprobs is not None:
                entry = update.logprobs[i]
                line.logprobs.extend((entry,))
                line.cumulative_logprob = (line.cumulative_logprob or 0.0) + entry.logprob
            is_shown = line.detokenizer is not None and not job.text_at_end and i < num_new - num_hidden
            if is_shown and self._show(job, line, token):
                return True
        if update.finished:
            line.error, line.pooled = update.error, update.pooled
            self._end(line, update.seq.finish_reason, update.seq.stop_reason, job, num_hidden)
        return False

    def _show(self, job: Job, line: Line, token: int) -> bool:
        """Turn one token into text; True when it completed a stop string."""
        assert line.detokenizer is not None
        text = line.detokenizer.push((token,))
        if line.stops is None:
            if text:
                line.pieces.append(text)
            return False
        if not text:
            return False
        match = line.stops.push(text, may_stop=len(line.token_ids) > job.params.min_tokens)
        if match.text:
            line.pieces.append(match.text)
        if match.stop is None:
            return False
        line.finish_reason, line.stop_reason = FinishReason.STOP.value, match.stop
        return True

    def _end(
        self, line: Line, reason: FinishReason | None, stop_reason: int | str | None, job: Job, num_hidden: int
    ) -> None:
        assert reason is not None
        line.finish_reason, line.stop_reason = reason.value, stop_reason
        if line.detokenizer is None:
            return
        text = line.detokenizer.push(line.token_ids[: len(line.token_ids) - num_hidden]) if job.text_at_end else ""
        text += line.detokenizer.flush()
        if line.stops is not None:
            match = line.stops.push(text, may_stop=len(line.token_ids) > job.params.min_tokens)
            text = match.text if match.stop is not None else match.text + line.stops.flush()
            if match.stop is not None:
                line.finish_reason, line.stop_reason = FinishReason.STOP.value, match.stop
        if text:
            line.pieces.append(text)

    def _token_text(self, token: int) -> str | None:
        # Its bytes, not decode(): that would drop a SentencePiece token's leading space.
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _output(self, job: Job) -> RequestOutput | None:
        """The next output of a request; None where the user wants only the end and this is not it."""
        request, kind = job.request, job.params.output_kind
        lines = list(job.lines.values())
        finished = lines[0].finish_reason is not None
        if request.n > 1:
            lines.sort(key=lambda line: line.seq.index)
            # A request that ends before its prompt is done has one sequence, and that has no token.
            finished = all(line.finish_reason is not None for line in lines) and (
                len(lines) == request.n or not lines[0].token_ids
            )
        if finished:
            del self._jobs[request.request_id]
        elif kind is OutputKind.FINAL_ONLY:
            return None
        delta = kind is OutputKind.DELTA
        num_cached = lines[0].seq.num_cached_tokens
        num_created = 0
        if self.cached_block_size is not None:
            num_created = request.num_prompt_tokens // self.cached_block_size * self.cached_block_size - num_cached
        return RequestOutput(
            request_id=request.request_id,
            prompt=job.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[_completion(line, delta) for line in lines],
            finished=finished,
            prompt_logprobs=job.prompt_logprobs,
            metrics=_metrics(request.arrival_s, [line.seq for line in lines], len(lines[0].token_ids)),
            num_cached_tokens=num_cached,
            num_cache_creation_tokens=num_created,
        )


def _is_stop_token(seq: Sequence, params: SamplingParams) -> bool:
    """Whether the last token is one that ends a text and is no part of it, as a stop string is not."""
    by_token = seq.finish_reason is FinishReason.STOP and not isinstance(seq.stop_reason, str)
    return by_token and not params.include_stop_str_in_output


def _completion(line: Line, delta: bool) -> CompletionOutput:
    pieces, token_ids, logprobs = line.pieces, line.token_ids, line.logprobs
    if delta:
        first_token, line.num_sent_tokens = line.num_sent_tokens, len(token_ids)
        token_ids = token_ids[first_token:]
        line.pieces = []  # the next output holds only newer text
        if logprobs is not None:
            logprobs = logprobs[first_token:]
    else:
        token_ids = token_ids[:]
        if logprobs is not None:
            logprobs = logprobs[:]
        if len(pieces) > 1:
            # Keep cumulative text joined: else each output of a long text would join all of it again.
            line.pieces = pieces = ["".join(pieces)]
    return CompletionOutput(
        line.seq.index,
        pieces[0] if len(pieces) == 1 else "".join(pieces),
        token_ids,
        line.cumulative_logprob,
        logprobs,
        line.finish_reason,
        line.stop_reason,
        line.error,
        pooled=line.pooled,
    )


def _metrics(arrival: float, seqs: list[Sequence], num_output_tokens: int) -> RequestMetrics:
    """`num_output_tokens` are the first sequence's, whose times these are."""
    first = seqs[0]
    metrics = RequestMetrics(arrival)
    metrics.num_preemptions, metrics.num_recomputed_tokens = first.num_preemptions, first.num_recomputed_tokens
    metrics.num_draft_tokens, metrics.num_accepted_tokens = first.num_draft_tokens, first.num_accepted_tokens
    for other in seqs[1:]:
        metrics.num_draft_tokens += other.num_draft_tokens
        metrics.num_accepted_tokens += other.num_accepted_tokens
        metrics.num_preemptions += other.num_preemptions
        metrics.num_recomputed_tokens += other.num_recomputed_tokens
    metrics.cache_outcome = None if first.cache_outcome is None else first.cache_outcome.value
    if first.first_scheduled_s is not None:
        metrics.queue_s = first.first_scheduled_s - arrival
    if first.first_token_s is not None:
        metrics.first_token_s = first.first_token_s - arrival
        if first.last_token_s is not None and num_output_tokens > 1:
            metrics.inter_token_s = (first.last_token_s - first.first_token_s) / (num_output_tokens - 1)
    if first.finished_s is not None:  # nothing to look for before
        ends = [s.finished_s for s in seqs if s.finished_s is not None]
        if len(ends) == len(seqs):
            metrics.total_s = max(ends) - arrival
    return metrics
