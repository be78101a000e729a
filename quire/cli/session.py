"""An engine as the terminal commands use it: streams of text, and an account at the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.batch import run_batch
from quire.engine.llm_engine import LLMEngine
from quire.inputs import Prompt
from quire.llm import log_start
from quire.log import get_logger
from quire.outputs import RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.request import Request


@dataclass(slots=True)
class Account:
    """Numbers for the closing lines that the engine does not count itself."""

    output_tokens: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    inter_token_s: float | None = None
    peak_blocks: int = 0
    waste_percent_at_peak: float = 0.0


class Session:
    """Runs prompts to their end, streaming, and keeps the account."""

    def __init__(self, config: EngineConfig, *, quiet: bool = False, verbose: bool = False) -> None:
        if quiet:
            get_logger().setLevel(logging.ERROR)
        started = time.perf_counter()
        self.engine = LLMEngine.from_config(config, show_progress=not quiet)
        (log_start if verbose else _log_ready)(self.engine, time.perf_counter() - started)
        self.account = Account()
        self._next_id = 0

    def stream(self, prompts: list[Prompt], params: SamplingParams) -> Generator[RequestOutput, None, None]:
        """All prompts at once; outputs are deltas, request_id is the prompt's index. Closing it aborts what is left."""
        params = params.clone(output_kind=OutputKind.DELTA)
        started = time.perf_counter()
        first = self._next_id
        self._next_id += len(prompts)
        ids = [str(first + i) for i in range(len(prompts))]
        prepared = [self.engine.prepare(i, prompt, params) for i, prompt in zip(ids, prompts, strict=True)]

        def add(i: int) -> Request:
            self.engine.add_prepared(prepared[i])
            return prepared[i].request

        try:
            with closing(run_batch(self.engine, add, len(prompts), in_slices=False)) as steps:
                for outputs in steps:
                    for output in outputs:
                        self._count(output)
                        output.request_id = str(int(output.request_id) - first)
                        yield output
                    self._sample_cache()
        finally:
            for stopped in self.engine.abort_request(ids):
                self._count(stopped)
            self.account.seconds += time.perf_counter() - started

    def _count(self, output: RequestOutput) -> None:
        account = self.account
        account.output_tokens += sum(len(c.token_ids) for c in output.outputs)
        if output.finished and output.metrics is not None:
            account.first_token_s = output.metrics.first_token_s
            account.inter_token_s = output.metrics.inter_token_s

    def _sample_cache(self) -> None:
        stats = self.engine.core.kv.stats
        if stats.num_used >= self.account.peak_blocks:
            self.account.peak_blocks = stats.num_used
            self.account.waste_percent_at_peak = stats.waste_percent

    def account_lines(self) -> list[str]:
        account, stats, ledger = self.account, self.engine.core.kv.stats, self.engine.ledger
        num_in, num_cached = self.engine.request_stats.prompt_tokens, self.engine.request_stats.cached_prompt_tokens
        rate = account.output_tokens / account.seconds if account.seconds else 0.0
        speed = f"{account.output_tokens} tokens out, {num_in} in, {account.seconds:.2f} s: {rate:.1f} tok/s"
        if account.first_token_s is not None:
            speed += f" (last request: first token {account.first_token_s * 1e3:.0f} ms"
            if account.inter_token_s is not None:
                speed += f", then {account.inter_token_s * 1e3:.1f} ms each"
            speed += ")"
        used = 100 * account.peak_blocks / ledger.num_blocks
        found = 100 * num_cached / num_in if num_in else 0.0
        drafts = self.engine.core.scheduler.stats
        drafted = f"drafts: {drafts.num_accepted_tokens} of {drafts.num_draft_tokens} tokens accepted"
        return [
            speed,
            *([drafted] if self.engine.core.scheduler.drafter is not None else []),
            f"KV cache: {ledger.num_blocks} blocks of {ledger.block_size} tokens, at most {account.peak_blocks} in use "
            f"({used:.1f} %), {account.waste_percent_at_peak:.1f} % of those slots empty; "
            f"{stats.num_cached} blocks kept for reuse",
            f"prefix cache: {num_cached} of {num_in} prompt tokens found ({found:.0f} %)",
        ]

    def print_account(self) -> None:
        sys.stdout.flush()
        for line in self.account_lines():
            print(f"quire: {line}", file=sys.stderr)


def _log_ready(engine: LLMEngine, seconds: float) -> None:
    """Log in one line which model runs on which device; log_start has the rest."""
    backend, log = engine.built.executor.backend, get_logger()
    log.info(
        "%s in %s on %s, %s, ready in %.1f s",
        engine.config.model,
        backend.shown_weights,
        backend.device.type,
        backend.kernels,
        seconds,
    )
    if backend.note:
        log.warning("%s", backend.note)
