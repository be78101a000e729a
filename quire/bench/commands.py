"""What each `quire bench` command runs. A command yields its runs one by one, so that an error or Ctrl-C in a later
one leaves the earlier ones standing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from quire import EngineConfig
from quire.bench.client import ClientRequest, Target, server_address
from quire.bench.dataset import read_exchanges
from quire.bench.engines import EngineShelf
from quire.bench.jobs import Job, check_workload_flags, make_jobs
from quire.bench.machine import describe_machine
from quire.bench.measure import Stage, measure_repeats, median_run, merge_repeats, run_repeats
from quire.bench.progress import WARM_UP, Progress, RunProgress, WarmUpInterrupted, run_progress
from quire.bench.report import Percentiles, RunReport
from quire.bench.serve import Load, client_requests, parse_goodput, run_serve
from quire.bench.text import errors_text
from quire.bench.workloads import Workload, fixed, usable_vocab
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire import LLMEngine
    from quire.bench.hf import HFBaseline

Runs = Iterator[RunReport]


def throughput(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    """The workloads, one after the other."""
    check_workload_flags(args)
    check_counts(args, repeats=1, num_warmups=0)
    for engine in _engines(args):
        if engine == "hf":
            if args.request_rate is not None or args.n != 1 or args.temperature:
                raise ConfigError(
                    "--engine hf runs greedy static batches: leave --request-rate, --n, --temperature out"
                )
            yield from _baseline_runs(args, config, shelf)
        else:
            yield from _quire_runs(args, config, shelf)


def _engines(args: argparse.Namespace) -> list[str]:
    return ["quire", "hf"] if args.engine == "both" else [args.engine]


def _quire_runs(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    engine = shelf.engine(config)
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "n": args.n}
    for job in _jobs(args, engine):
        yield _measure_job(args, engine, job, sampling)


def _jobs(args: argparse.Namespace, engine: LLMEngine) -> Iterator[Job]:
    encode = None if engine.tokenizer is None else engine.tokenizer.encode
    return make_jobs(args, vocab_size=engine.spec.vocab_size, max_model_len=engine.max_model_len, encode=encode)


def _measure_job(args: argparse.Namespace, engine: LLMEngine, job: Job, sampling: dict[str, Any]) -> RunReport:
    with run_progress(job.name) as progress:
        return measure_repeats(
            engine,
            job.workload,
            warm=job.warm,
            num_warmups=args.num_warmups,
            repeats=args.repeats,
            name=job.name,
            parameters=job.parameters,
            arrivals=job.arrivals,
            sampling=sampling,
            stage=_stages(progress, sampling.get("n", 1)),
        )


def _stages(progress: RunProgress, n: int = 1) -> Stage:
    """Begins the stages of a run in which each prompt has `n` answers."""

    def begin(name: str, work: Workload) -> Progress:
        return progress.stage(name, len(work), n * sum(num_out for _, num_out in work))

    return begin


def _baseline_runs(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    encode = shelf.encoder(config) if args.dataset else None
    baseline = shelf.baseline(config, args.hf_max_batch_size)
    longest = min(baseline.max_model_len, config.max_model_len or baseline.max_model_len)
    for job in make_jobs(args, vocab_size=baseline.vocab_size, max_model_len=longest, encode=encode):
        # A few tokens once: there is nothing to compile or capture.
        warm = [[(prompt, 4) for prompt, _ in job.warm[: baseline.batch_size]]] if args.num_warmups else []
        reports = _baseline_repeats(baseline, job.workload, warm, args.repeats, job.name, job.parameters)
        chosen = median_run(reports)
        merge_repeats(chosen, reports)
        yield chosen


def _baseline_repeats(
    baseline: HFBaseline, work: Workload, warm_ups: list[Workload], repeats: int, name: str, parameters: dict[str, Any]
) -> list[RunReport]:
    with run_progress(name) as progress:
        begin = _stages(progress)
        for warm in warm_ups:
            if baseline.measure(warm, progress=begin(WARM_UP, warm)).interrupted:
                raise WarmUpInterrupted
        return run_repeats(
            repeats,
            lambda repeat: baseline.measure(work, name=name, parameters=parameters, progress=begin(repeat, work)),
        )


def latency(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    """One batch again and again: how long it takes from start to end."""
    check_counts(args, num_iters=1, num_iters_warmup=0, batch_size=1, input_len=1, output_len=1)
    shape = {"num": args.batch_size, "num_in": args.input_len, "num_out": args.output_len}
    name = f"{args.batch_size} x ({args.input_len} in, {args.output_len} out)"
    for which in _engines(args):
        if which == "hf":
            baseline = shelf.baseline(config, args.batch_size)
            work = fixed(usable_vocab(baseline.vocab_size), **shape)
            warm = [work] * args.num_iters_warmup
            reports = _baseline_repeats(baseline, work, warm, args.num_iters, name, dict(shape))
            chosen = reports[-1]
            merge_repeats(chosen, reports)
        else:
            engine = shelf.engine(config)
            vocab = usable_vocab(engine.spec.vocab_size)
            with run_progress(name) as progress:
                chosen = measure_repeats(
                    engine,
                    fixed(vocab, **shape),
                    warm=fixed(vocab, seed=100_000, **shape),
                    num_warmups=args.num_iters_warmup,
                    repeats=args.num_iters,
                    name=name,
                    parameters=dict(shape),
                    stage=_stages(progress),
                )
        batches = Percentiles.of(chosen.repeat_values["seconds"])
        assert batches is not None
        chosen.values |= {f"batch_{p}_s": getattr(batches, p) for p in ("p50", "p95", "p99", "mean", "max")}
        yield chosen


def prefix(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    """The same work with prefix caching on and off."""
    check_workload_flags(args)
    check_counts(args, repeats=1, num_warmups=0)
    if config.pinned_prefixes or not config.enable_prefix_caching:
        raise ConfigError("quire bench prefix turns prefix caching on and off itself: leave it out of the flags")
    for setting in ("on", "off"):
        own = config.replace(enable_prefix_caching=setting == "on", given=config.given | {"enable_prefix_caching"})
        engine = shelf.engine(own)
        for job in _jobs(args, engine):
            report = _measure_job(args, engine, job, {})
            report.point = {"prefix-caching": setting}
            yield report
            if report.interrupted:
                return


def startup(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    from quire.bench.startup import measure_startup

    check_counts(args, repeats=1)
    yield measure_startup(config, repeats=args.repeats)


def speculate(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    from quire.bench.speculate import measure_speculation

    check_counts(args, repeats=1, output_len=2)
    yield from measure_speculation(
        shelf.engine(config),
        loads=args.loads,
        methods=args.methods,
        texts=args.texts,
        num_out=args.output_len,
        repeats=args.repeats,
        in_cpu_time=args.cpu_time,
    )


def profile(args: argparse.Namespace, config: EngineConfig, shelf: EngineShelf) -> Runs:
    from quire.bench.profile import profile_workload
    from quire.bench.steps import take_cache_pages

    check_workload_flags(args)
    engine = shelf.engine(config)
    take_cache_pages(engine.core)
    for job in _jobs(args, engine):
        with run_progress(job.name) as progress:
            begin = _stages(progress)
            warm, _ = profile_workload(engine, job.warm, name=job.name, progress=begin(WARM_UP, job.warm))
            if warm.interrupted:
                raise WarmUpInterrupted
            engine.reset_prefix_cache()
            report, _ = profile_workload(engine, job.workload, name=job.name, progress=begin("", job.workload))
        report.parameters = job.parameters
        yield report


def serve(args: argparse.Namespace, shelf: EngineShelf) -> Runs:
    """Load on a server; nothing is loaded here."""
    check_workload_flags(args)
    check_counts(args, repeats=1, num_warmups=0, max_concurrency=1, vocab_size=11)
    goodput = parse_goodput(args.goodput or [])
    base_url = server_address(args.base_url, args.host, args.port)
    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be more than 0 seconds, got {args.timeout:g}")
    target = Target(
        base_url=base_url,
        endpoint=args.endpoint or ("/v1/chat/completions" if args.backend == "openai-chat" else "/v1/completions"),
        model=args.model or "",
        api_key=args.api_key,
        timeout_s=args.timeout,
        body={"temperature": args.temperature} | ({"ignore_eos": True} if args.ignore_eos else {}),
    )
    encode = shelf.encoder(EngineConfig(model=args.tokenizer)) if args.tokenizer and args.dataset else _estimate
    for job in make_jobs(args, vocab_size=args.vocab_size, max_model_len=args.max_len, encode=encode):
        requests = client_requests(job.workload, as_text=target.is_chat, seed=args.seed or 0)
        if args.dataset:
            requests = _texts(args, job, encode)
        load = Load(
            target=target,
            requests=requests,
            arrivals=job.arrivals or [0.0] * len(requests),
            max_concurrency=args.max_concurrency,
            num_warmups=args.num_warmups,
            goodput_s=goodput,
        )
        parameters = job.parameters | {"max_concurrency": args.max_concurrency}
        if args.goodput:
            parameters["goodput"] = " ".join(args.goodput)
        with run_progress(job.name) as progress:
            run = partial(run_serve, load, name=job.name, parameters=parameters, progress=progress)
            reports = run_repeats(args.repeats, run)
        chosen = median_run(reports)
        chosen.interrupted = reports[-1].interrupted or len(reports) < args.repeats
        merge_repeats(chosen, reports)
        chosen.notes += [
            f"another repeat had errors: {errors_text(r)}" for r in reports if r.errors and r is not chosen
        ]
        chosen.machine = describe_machine()
        yield chosen


def _texts(args: argparse.Namespace, job: Job, encode: Any) -> list[ClientRequest]:
    """The dataset's own prompts: a server counts their tokens itself."""
    by_tokens = {tuple(encode(e.prompt)): e.prompt for e in read_exchanges(args.dataset)}
    return [ClientRequest(by_tokens[tuple(prompt)], num_out) for prompt, num_out in job.workload]


def _estimate(text: str) -> list[int]:
    """Token ids where there is no tokenizer: a text's bytes in fours, about as many as English has tokens. Only their
    number is used."""
    data = text.encode()
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


def check_counts(args: argparse.Namespace, **least: int) -> None:
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
