"""From sequence updates to RequestOutputs: text, stop strings, logprobs, timings."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.params import OutputKind
from quire.plan import TokenLogprobs
from quire.request import FinishReason, Request, Sequence
from quire.scheduler import SequenceUpdate
from quire.text import Detokenizer, StopStrings, Tokenizer


@dataclass(slots=True, eq=False)
class _Line:
    """What is shown of one sequence so far."""

    seq: Sequence
    detokenizer: Detokenizer | None
    stops: StopStrings | None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_sent_pieces: int = 0
    num_sent_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    """A request whose end has not been told yet."""

    request: Request
    prompt: str | None
    lines: dict[int, _Line] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    # Nobody looks before the end, so the text is made there, in one go.
    text_at_end: bool = False


class OutputProcessor:
    """Holds the text side of every running request."""

    def __init__(self, tokenizer: Tokenizer | None, *, cached_block_size: int | None) -> None:
        self.tokenizer = tokenizer
        self.cached_block_size = cached_block_size  # None: prefix caching is off
        self._jobs: dict[str, _Job] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request: Request, prompt: str | None) -> None:
        params = request.params
        job = _Job(request, prompt)
        job.text_at_end = params.output_kind is OutputKind.FINAL_ONLY and not params.stop
        if params.prompt_logprobs is not None:
            job.prompt_logprobs = [None]  # nothing predicts the first token
        self._jobs[request.request_id] = job

    def request_ids(self) -> list[str]:
        return list(self._jobs)

    def process(self, updates: list[SequenceUpdate]) -> tuple[list[RequestOutput], list[tuple[Sequence, str]]]:
        """What to tell the users, and the sequences that a stop string ended (for the scheduler to let go)."""
        touched: dict[str, _Job] = {}
        stopped: list[tuple[Sequence, str]] = []
        for update in updates:
            job = self._jobs.get(update.seq.request.request_id)
            if job is None:
                continue  # told already: a stop string or an abort ended it, and this is a late token
            line = self._line(job, update.seq)
            if line.finish_reason is not None:
                continue
            if self._take(job, line, update):
                assert isinstance(line.stop_reason, str)
                stopped.append((update.seq, line.stop_reason))
            touched[job.request.request_id] = job
        outputs = [output for job in touched.values() if (output := self._output(job)) is not None]
        return outputs, stopped

    def _line(self, job: _Job, seq: Sequence) -> _Line:
        line = job.lines.get(seq.index)
        if line is None:
            line = job.lines[seq.index] = self._new_line(job.request, seq)
        return line

    def _new_line(self, request: Request, seq: Sequence) -> _Line:
        params = request.params
        detokenizer = stops = None
        if params.detokenize and self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                prompt_token_ids=request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.stop:
                stops = StopStrings(list(params.stop), include_in_output=params.include_stop_str_in_output)
        line = _Line(seq, detokenizer, stops)
        if params.logprobs is not None:
            line.logprobs, line.cumulative_logprob = [], 0.0
        return line

    def _take(self, job: _Job, line: _Line, update: SequenceUpdate) -> bool:
        """Add an update to a line. True when a stop string ends it now."""
        if update.prompt_logprobs and job.prompt_logprobs is not None:
            job.prompt_logprobs.extend(self._logprob_dict(entry) for entry in update.prompt_logprobs)
        for i, token in enumerate(update.new_token_ids):
            line.token_ids.append(token)
            if line.logprobs is not None and update.logprobs is not None:
                entry = update.logprobs[i]
                line.logprobs.append(self._logprob_dict(entry))
                line.cumulative_logprob = (line.cumulative_logprob or 0.0) + entry.logprob
            if line.detokenizer is not None and not job.text_at_end and self._show(job, line, token):
                return True
        if update.finished:
            line.error = update.error
            self._end(line, update.seq.finish_reason, update.seq.stop_reason, job)
        return False

    def _show(self, job: _Job, line: _Line, token: int) -> bool:
        """Turn one token into text; True when it completed a stop string."""
        assert line.detokenizer is not None
        text = line.detokenizer.push((token,))
        if line.stops is None:
            if text:
                line.pieces.append(text)
            return False
        if not text:
            return False
        match = line.stops.push(text, may_stop=len(line.token_ids) > job.request.params.min_tokens)
        if match.text:
            line.pieces.append(match.text)
        if match.stop is None:
            return False
        line.finish_reason, line.stop_reason = FinishReason.STOP.value, match.stop
        return True

    def _end(self, line: _Line, reason: FinishReason | None, stop_reason: int | str | None, job: _Job) -> None:
        assert reason is not None
        line.finish_reason, line.stop_reason = reason.value, stop_reason
        if line.detokenizer is None:
            return
        text = line.detokenizer.push(line.token_ids) if job.text_at_end else ""
        text += line.detokenizer.flush()
        if line.stops is not None:
            match = line.stops.push(text, may_stop=len(line.token_ids) > job.request.params.min_tokens)
            text = match.text if match.stop is not None else match.text + line.stops.flush()
            if match.stop is not None:
                line.finish_reason, line.stop_reason = FinishReason.STOP.value, match.stop
        if text:
            line.pieces.append(text)

    def _logprob_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The position's own token first, then the top ones, as vLLM orders them."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        for rank, (token, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1):
            if token not in found:
                found[token] = Logprob(logprob, rank, self._token_text(token))
        return found

    def _token_text(self, token: int) -> str | None:
        # Its bytes, not decode(): that would drop a SentencePiece token's leading space.
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _output(self, job: _Job) -> RequestOutput | None:
        """None where the user wants the end only and this is not it."""
        request, kind = job.request, job.request.params.output_kind
        finished = len(job.lines) == request.params.n and all(
            line.finish_reason is not None for line in job.lines.values()
        )
        if not finished and kind is OutputKind.FINAL_ONLY:
            return None
        if finished:
            del self._jobs[request.request_id]
        delta = kind is OutputKind.DELTA
        lines = [job.lines[i] for i in sorted(job.lines)]
        num_cached = request.sequences[0].num_cached_tokens
        num_created = 0
        if self.cached_block_size is not None:
            num_created = request.num_prompt_tokens // self.cached_block_size * self.cached_block_size - num_cached
        return RequestOutput(
            request_id=request.request_id,
            prompt=job.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[_completion(line, delta=delta) for line in lines],
            finished=finished,
            prompt_logprobs=job.prompt_logprobs,
            metrics=_metrics(request),
            num_cached_tokens=num_cached,
            num_cache_creation_tokens=num_created,
        )


def _completion(line: _Line, *, delta: bool) -> CompletionOutput:
    first_piece = line.num_sent_pieces if delta else 0
    first_token = line.num_sent_tokens if delta else 0
    line.num_sent_pieces, line.num_sent_tokens = len(line.pieces), len(line.token_ids)
    if not delta and len(line.pieces) > 1:
        # Keep what is cumulative joined: else each output of a long text would join all of it again.
        line.pieces = ["".join(line.pieces)]
    return CompletionOutput(
        index=line.seq.index,
        text="".join(line.pieces[first_piece:]),
        token_ids=line.token_ids[first_token:],
        cumulative_logprob=line.cumulative_logprob,
        logprobs=None if line.logprobs is None else line.logprobs[first_token:],
        finish_reason=line.finish_reason,
        stop_reason=line.stop_reason,
        error=line.error,
    )


def _metrics(request: Request) -> RequestMetrics:
    arrival = request.arrival_s
    seqs = request.sequences
    metrics = RequestMetrics(arrival_s=arrival)
    metrics.num_preemptions = sum(s.num_preemptions for s in seqs)
    metrics.num_recomputed_tokens = sum(s.num_recomputed_tokens for s in seqs)
    first = seqs[0]
    metrics.cache_outcome = None if first.cache_outcome is None else first.cache_outcome.value
    if first.first_scheduled_s is not None:
        metrics.queue_s = first.first_scheduled_s - arrival
    if first.first_token_s is not None:
        metrics.first_token_s = first.first_token_s - arrival
        if first.last_token_s is not None and first.num_output_tokens > 1:
            metrics.inter_token_s = (first.last_token_s - first.first_token_s) / (first.num_output_tokens - 1)
    ends = [s.finished_s for s in seqs if s.finished_s is not None]
    if ends and len(ends) == request.params.n:
        metrics.total_s = max(ends) - arrival
    return metrics
