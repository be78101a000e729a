"""The baseline without paging: transformers' generate() in static batches, in order of arrival, on the same work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire import EngineConfig
from quire.bench.machine import describe_machine, num_usable_cpus, peak_rss_bytes, rss_bytes
from quire.bench.measure import check_lengths
from quire.bench.progress import Progress
from quire.bench.report import Percentiles, RunReport, Sample
from quire.bench.workloads import Workload
from quire.errors import ConfigError, ModelError
from quire.interrupt import StopFlag, stop_on_interrupt


class HFBaseline:
    """A loaded model. Every batch is padded to its longest prompt and runs until its longest output is done."""

    def __init__(self, config: EngineConfig, *, batch_size: int = 16) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise ConfigError("--engine hf needs transformers: pip install transformers") from None
        from quire.weights import resolve_model

        if batch_size < 1:
            raise ConfigError(f"the static batch must hold at least one request, got {batch_size}")
        self.batch_size = batch_size
        self.device = "cuda" if config.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"
        dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if self.device == "cuda" else "float32")
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        path = resolve_model(
            config.model, revision=config.revision, load_format=config.load_format, download_dir=config.download_dir
        )
        where: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        try:
            if config.load_format == "dummy":
                from transformers import AutoConfig

                shape = AutoConfig.from_pretrained(path)
                torch.manual_seed(config.seed)
                make: Any = AutoModelForCausalLM
                self.model: Any = make.from_config(shape, dtype=getattr(torch, dtype))
            else:
                source = path.parent if where else path
                self.model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **where)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"transformers cannot load {config.model}: {str(error).splitlines()[0]}") from None
        self.model.eval().to(self.device)
        self.settings: dict[str, Any] = {
            "model": config.model,
            "device": self.device,
            "dtype": dtype,
            "batch_size": batch_size,
            "num_threads": torch.get_num_threads(),
        }

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def max_model_len(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def measure(
        self,
        workload: Workload,
        *,
        name: str = "",
        parameters: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> RunReport:
        """All requests arrive at once, and batches run one after the other: later ones wait."""
        check_lengths(workload, self.max_model_len, name)
        run = _StaticRun(len(workload))
        with stop_on_interrupt() as stop:
            for first in range(0, len(workload), self.batch_size):
                if not stop.is_set:
                    self._run_batch(workload[first : first + self.batch_size], run, stop, progress)
        report = run.report(stop.is_set)
        report.workload, report.parameters = name, dict(parameters or {})
        report.settings, report.machine = dict(self.settings), describe_machine()
        return report

    def _run_batch(self, batch: Workload, run: _StaticRun, stop: StopFlag, progress: Progress | None) -> None:
        import torch

        width, longest = max(len(p) for p, _ in batch), max(n for _, n in batch)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch], device=self.device)
        run.start_batch(batch, width, longest)

        def after_token(tokens: Any, scores: Any, **_: Any) -> Any:
            if self.device == "cuda":
                torch.cuda.synchronize()
            run.on_token()
            if progress is not None:
                progress(run.output_tokens, run.completed)
            return torch.full((tokens.shape[0],), stop.is_set, device=tokens.device, dtype=torch.bool)

        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[after_token],
            )
        run.end_batch()


@dataclass(slots=True)
class _StaticRun:
    """Static batches as they go. A request gets its answer when its batch ends."""

    num_requests: int
    started_s: float = field(default_factory=time.perf_counter)
    batch: Workload = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    batch_started_s: float = 0.0
    num_started: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    slots_reserved: int = 0  # summed over batches: sequences by longest prompt and longest output
    slots_reserved_peak: int = 0
    num_steps: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    _sampled: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.process_time()))

    def start_batch(self, batch: Workload, width: int, longest: int) -> None:
        self.batch, self.token_times, self.batch_started_s = batch, [], time.perf_counter()
        self.num_started += len(batch)
        self.prompt_tokens += sum(len(p) for p, _ in batch)
        self.slots_reserved += len(batch) * (width + longest)
        self.slots_reserved_peak = max(self.slots_reserved_peak, len(batch) * (width + longest))

    def on_token(self) -> None:
        now = time.perf_counter()
        self.token_times.append(now)
        self.num_steps += 1
        # Only tokens that were asked for count: shorter sequences of the batch go on for nothing.
        self.output_tokens += sum(n >= len(self.token_times) for _, n in self.batch)
        if now - self._sampled[0] >= 0.05:
            then, cpu_then = self._sampled
            cpu = time.process_time()
            self.samples.append(
                Sample(
                    t_s=now - self.started_s,
                    running=len(self.batch),
                    waiting=self.num_requests - self.num_started,
                    rss_bytes=rss_bytes(),
                    prompt_tokens=self.prompt_tokens,
                    output_tokens=self.output_tokens,
                    cpu_percent=100 * (cpu - cpu_then) / (now - then) / num_usable_cpus(),
                    device_percent=100.0,
                )
            )
            self._sampled = (now, cpu)

    def end_batch(self) -> None:
        times, ended = self.token_times, time.perf_counter()
        if not times:
            return
        self.prefill_s += times[0] - self.batch_started_s
        self.decode_s += times[-1] - times[0]
        for _, num_out in self.batch:
            own = times[:num_out]
            self.ttft_s.append(own[0] - self.started_s)
            self.itl_s += [b - a for a, b in itertools.pairwise(own)]
            self.decode_tokens += len(own) - 1
            if len(own) > 1:
                self.tpot_s.append((own[-1] - own[0]) / (len(own) - 1))
            if len(own) == num_out:
                self.completed += 1
                self.e2e_s.append(ended - self.started_s)

    def report(self, interrupted: bool) -> RunReport:
        seconds = max(time.perf_counter() - self.started_s, 1e-9)
        held = self.prompt_tokens + self.output_tokens
        return RunReport(
            workload="",
            engine="hf",
            requests=self.num_requests,
            completed=self.completed,
            interrupted=interrupted,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            seconds=seconds,
            output_tok_s=self.output_tokens / seconds,
            total_tok_s=held / seconds,
            prefill_tok_s=self.prompt_tokens / self.prefill_s if self.prefill_s else None,
            decode_tok_s=self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s else None,
            ttft_s=Percentiles.of(self.ttft_s),
            itl_s=Percentiles.of(self.itl_s),
            tpot_s=Percentiles.of(self.tpot_s),
            e2e_s=Percentiles.of(self.e2e_s),
            num_steps=self.num_steps,
            peak_rss_bytes=max([rss_bytes(), *(s.rss_bytes for s in self.samples)], default=peak_rss_bytes()),
            cpu_percent=sum(s.cpu_percent for s in self.samples) / len(self.samples) if self.samples else None,
            # What a cache that is reserved for padded batches leaves empty at its fullest.
            values={
                "padding_waste_percent": 100 * (1 - held / self.slots_reserved) if self.slots_reserved else 0.0,
                "kv_slots_reserved_peak": float(self.slots_reserved_peak),
            },
            samples=self.samples,
        )
