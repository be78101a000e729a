"""quire bench: how fast, how much memory, which settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.cli.options import add_engine_flags, engine_config
from quire.cli.parser import Parser, WideHelp, needs_server
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError


@dataclass(slots=True)
class _Found:
    """The reports of a command, and how it ended."""

    runs: list[Any]
    failure: QuireError | None = None
    interrupted: bool = False


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure throughput, latency, memory; compare runs",
        description="Benchmarks. Tables go to stdout, progress to stderr; --output-json keeps everything.",
    )
    add_commands(parser)


def add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_offline(commands)
    _add_serve(commands)
    _add_sweep(commands)
    _add_compare(commands)
    _add_router(commands)


def _add_offline(commands: Any) -> None:
    from quire.bench.jobs import add_workload_flags

    parser = _command(commands, "throughput", "tokens per second on seeded workloads, with everything around them")
    add_workload_flags(parser, default="lab16")
    _repeat_flags(parser, repeats=3, num_warmups=1)
    _baseline_flags(parser)
    parser.add_argument("--n", type=int, default=1, metavar="N", help="continuations per prompt (default 1)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="N", help="0 (the default) is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="N", help="nucleus sampling (default 1: all)")
    add_engine_flags(parser)

    parser = _command(commands, "latency", "one batch, again and again", has_workloads=False)
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt (default 32)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="requests in the batch (default 8)")
    # Under vLLM's names, and under those that the other benchmarks have.
    parser.add_argument("--num-warmups", "--num-iters-warmup", dest="num_iters_warmup", type=int, default=1,
                        metavar="N", help="untimed runs (default 1)")  # fmt: skip
    parser.add_argument("--repeats", "--num-iters", dest="num_iters", type=int, default=5, metavar="N",
                        help="timed runs (default 5)")  # fmt: skip
    _baseline_flags(parser)
    add_engine_flags(parser)

    parser = _command(commands, "prefix", "prefix caching on against off")
    add_workload_flags(parser, default="shared16")
    _repeat_flags(parser, repeats=3, num_warmups=1)
    add_engine_flags(parser)

    text = "from nothing to the first token, in fresh processes"
    parser = _command(commands, "startup", text, has_workloads=False)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="processes (default 3)")
    add_engine_flags(parser)

    text = "drafting against plain decoding, on text that copies and text that does not, at several loads"
    parser = _command(commands, "speculate", text, has_workloads=False)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N",
                        help="sequences at once (default 1 4 16 64)")  # fmt: skip
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"], metavar="METHOD",
                        help="what drafts (default ngram suffix; with --spec-model also draft_model)")  # fmt: skip
    parser.add_argument("--texts", nargs="+", default=["edits", "extraction", "quotes", "free"], metavar="TEXT",
                        help="edits, extraction and quotes copy, free does not (default all)")  # fmt: skip
    parser.add_argument("--output-len", type=int, default=96, metavar="N", help="tokens of an answer (default 96)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs, in turn (default 3)")
    parser.add_argument("--cpu-time", action="store_true",
                        help="count CPU seconds, where a machine has other work; with --num-threads 1")  # fmt: skip
    add_engine_flags(parser)

    parser = _command(commands, "profile", "where a step's time goes")
    add_workload_flags(parser, default="lab16")
    add_engine_flags(parser)


def _add_serve(commands: Any) -> None:
    from quire.bench.client import add_address_flags
    from quire.bench.jobs import add_workload_flags

    parser = _command(commands, "serve", "load on an OpenAI-compatible server")
    add_address_flags(parser)
    parser.add_argument("--backend", choices=["openai", "openai-chat"], default="openai", help="completions or chat")
    parser.add_argument("--endpoint", help="default /v1/completions, with --backend openai-chat /v1/chat/completions")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--tokenizer", help="to count a dataset's tokens (default: four bytes are one)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--max-concurrency", type=int, metavar="N", help="requests under way at once (default: no cap)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="per request (default 600)")
    parser.add_argument("--goodput", nargs="+", metavar="METRIC:MS", help="also count requests within ttft:200 tpot:50")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="N", help="default 0")
    parser.add_argument("--vocab-size", type=int, default=32_000, metavar="N", help="prompts' token ids are below this")
    parser.add_argument("--max-len", type=int, default=2048, metavar="N", help="longest exchange taken from a dataset")
    parser.add_argument("--seed", type=int, help="of prompts and arrivals")
    parser.add_argument(
        "--no-ignore-eos", dest="ignore_eos", action="store_false", help="let the model end its answers"
    )
    add_workload_flags(parser, default="random")
    _repeat_flags(parser, repeats=1, num_warmups=0)


def _add_sweep(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="any flag over a list, with any of these inside",
        description="Run a benchmark at every point. Example: "
        "quire bench sweep --vary block-size=8,16,32 --vary max-num-seqs=4,16 throughput lab16",
    )
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="FLAG=A,B,…",
        help="a flag and its values; workload=… names workloads, switches take on,off; may be repeated",
    )
    parser.add_argument(
        "benchmark", choices=[*_OFFLINE, "serve"], metavar="BENCHMARK", help=", ".join([*_OFFLINE, "serve"])
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the benchmark's own flags, --output-json and --plot")
    parser.set_defaults(run=_run_sweep)


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser("compare", help="what changed between two --output-json files, beyond the noise")
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")
    parser.add_argument("--fail-on-worse", action="store_true", help="exit with 1 if anything is worse")
    parser.add_argument("--plot", metavar="FILE", help="charts (.svg, .html, .png, .pdf)")
    parser.set_defaults(run=_run_compare)


def _command(commands: Any, name: str, text: str, *, has_workloads: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text.capitalize() + ".",
        usage=f"quire bench {name} {'[WORKLOAD ...] [flags]' if has_workloads else '[flags]'}",
        formatter_class=WideHelp,
    )
    parser.add_argument("--output-json", metavar="FILE", help="keep every number")
    parser.add_argument("--plot", metavar="FILE", help="charts (.svg, .html, .png, .pdf)")
    parser.set_defaults(run=_run, benchmark=name)
    return parser


def _repeat_flags(parser: argparse.ArgumentParser, *, repeats: int, num_warmups: int) -> None:
    parser.add_argument("--repeats", type=int, default=repeats, metavar="N", help=f"timed runs (default {repeats})")
    text = f"untimed runs before, of other prompts (default {num_warmups})"
    if not num_warmups:
        text = "requests sent before the timed ones (default 0)"
    parser.add_argument("--num-warmups", type=int, default=num_warmups, metavar="N", help=text)


def _baseline_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=["quire", "hf", "both"],
        default="quire",
        help="hf: transformers' generate(), static batches",
    )
    parser.add_argument("--hf-max-batch-size", type=int, default=16, metavar="N", help="of --engine hf (default 16)")


# -- running


def _run(args: argparse.Namespace) -> int:
    from quire.bench.engines import EngineShelf

    _check_outputs(args)
    found = _collect(_produce(args, EngineShelf(_encoder)))
    return _finish(args, args.benchmark, found)


def _produce(args: argparse.Namespace, shelf: Any) -> Iterator[Any]:
    from quire.bench import commands

    if args.benchmark == "serve":
        return commands.serve(args, shelf)
    produce: Callable[..., Iterator[Any]] = getattr(commands, args.benchmark)
    return produce(args, engine_config(args), shelf)


def _encoder(config: EngineConfig) -> Callable[[str], list[int]]:
    """A model's tokenizer, without its weights."""
    from quire.text import Tokenizer
    from quire.weights import open_checkpoint, resolve_model

    path = resolve_model(
        config.tokenizer or config.model,
        revision=config.revision,
        load_format="dummy",
        download_dir=config.download_dir,
    )
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(open_checkpoint(path).gguf_metadata or {}, source=str(path)).encode
    return Tokenizer.from_directory(path).encode


_OFFLINE = ("throughput", "latency", "prefix", "startup", "speculate", "profile")


def _collect(produced: Iterator[Any]) -> _Found:
    found = _Found([])
    try:
        for report in produced:
            found.runs.append(report)
            if report.interrupted:
                found.interrupted = True
                break
    except KeyboardInterrupt:
        found.interrupted = True
    except QuireError as error:
        if not found.runs:
            raise
        found.failure = error  # told when what is there has been kept
    return found


def _run_sweep(args: argparse.Namespace) -> int:
    from quire.bench.engines import EngineShelf
    from quire.bench.jobs import parse_axes, point_arguments, points
    from quire.bench.report import RunReport

    inner = Parser(prog="quire bench")
    commands = inner.add_subparsers(required=True)
    _add_offline(commands)
    _add_serve(commands)
    # All points are read before the first one runs: a mistake in the last would come late.
    planned = [
        (point, inner.parse_args([args.benchmark, *args.flags, *point_arguments(point)]))
        for point in points(parse_axes(args.vary))
    ]
    outputs = planned[0][1]
    _check_outputs(outputs)
    shelf, found = EngineShelf(_encoder), _Found([])
    for point, own in planned:
        text = ", ".join(f"{flag}={value}" for flag, value in point.items())
        print(f"quire: sweep: {text}", file=sys.stderr)
        try:
            one = _collect(_produce(own, shelf))
        except QuireError as error:
            # One value that does not work says nothing about the others.
            print(f"quire: sweep: {text}: {error}", file=sys.stderr)
            one = _Found([RunReport(workload="failed", errors={str(error): 1})], failure=error)
        for report in one.runs:
            report.point = point | report.point
        found.runs += one.runs
        found.failure = one.failure or found.failure
        if outputs.output_json:
            _write(outputs.output_json, f"sweep {args.benchmark}", found.runs)
        if one.interrupted:
            found.interrupted = True
            break
    if found.failure is not None and all(run.workload == "failed" for run in found.runs):
        raise found.failure
    return _finish(outputs, args.benchmark, found, is_sweep=True)


def _run_compare(args: argparse.Namespace) -> int:
    from quire.bench.compare import Verdict, compare_files
    from quire.bench.report import BenchFile
    from quire.bench.text import comparison

    found, alone = compare_files(BenchFile.read(args.before), BenchFile.read(args.after))
    print("\n\n".join(comparison(one) for one in found))
    if alone:
        print(f"\nin one file only: {', '.join(alone)}")
    if args.plot:
        from quire.bench.plots import comparison_chart, write_charts

        write_charts(args.plot, [comparison_chart(found)], f"{args.before} -> {args.after}")
    is_worse = any(change.verdict is Verdict.WORSE for one in found for change in one.changes)
    return 1 if args.fail_on_worse and is_worse else 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse, before a long run, a chart that cannot be drawn or a file that cannot be written."""
    if args.plot:
        from quire.bench.plots import check_plot

        check_plot(args.plot)
    if args.output_json:
        from pathlib import Path

        path = Path(args.output_json)
        if path.is_dir():
            raise ConfigError(f"--output-json {path} is a folder: name a file")
        is_new = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"--output-json {path} cannot be written: {error.strerror or error}") from None


def _finish(args: argparse.Namespace, benchmark: str, found: _Found, *, is_sweep: bool = False) -> int:
    """Show, keep and draw what there is; then say what went wrong."""
    from quire.bench.text import show

    name = f"sweep {benchmark}" if is_sweep else benchmark
    if found.runs:
        print(show(benchmark, found.runs, is_sweep=is_sweep))
        if args.output_json:
            _write(args.output_json, name, found.runs)
        if args.plot:
            from quire.bench.plots import plot

            plot(args.plot, benchmark, found.runs, is_sweep=is_sweep)
    if found.failure is not None and not is_sweep:
        raise found.failure
    if found.interrupted:
        print("quire: interrupted" + (": what was measured until then is above" if found.runs else ""), file=sys.stderr)
    failure = None if is_sweep else _failed_requests(found.runs)  # at a point too far they are a sweep's finding
    if failure:
        print(f"quire: error: {failure}", file=sys.stderr)
    is_empty = any(run.requests for run in found.runs) and not any(run.completed for run in found.runs)
    return 130 if found.interrupted else int(bool(failure) or is_empty)


def _failed_requests(runs: list[Any]) -> str | None:
    """How many of a server's requests failed, in all repeats. It refuses others with 429 when it is full: those do not
    count."""
    num_failed = sum(sum(run.repeat_values.get("failed_requests", [])) for run in runs)
    num_sent = sum(run.requests * len(run.repeats) for run in runs)
    return f"{num_failed:.0f} of {num_sent} requests failed" if num_failed else None


def _write(path: str, name: str, runs: list[Any]) -> None:
    from quire.bench.report import BenchFile

    BenchFile(name, runs).write(path)


def _add_router(commands: Any) -> None:
    parser = commands.add_parser(
        "router",
        help="routing by cache and load against simpler ways and a peer's router, on servers of a small model",
        description="Servers of a small model with random weights run here; each way of routing gets the same traffic.",
        formatter_class=WideHelp,
    )
    parser.set_defaults(run=_run_router)
    parser.add_argument("--servers", type=int, default=4, metavar="N", help="servers of one thread each (default 4)")
    parser.add_argument("--traffic", nargs="+", default=None, metavar="KIND",
                        help="prefix, turns, skewed, bursty, unshared (default all)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of everything, in turn (default 1)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="1 is a hundred requests (default 1)")
    parser.add_argument("--concurrency", type=int, default=12, metavar="N", help="requests at once (default 12)")
    parser.add_argument("--output-len", type=int, default=8, metavar="N", help="tokens of an answer (default 8)")
    parser.add_argument("--model-size", choices=("15m", "135m"),
                        help="the servers' parameters; 135m is SmolLM2's shape (default 15m)")  # fmt: skip
    parser.add_argument(
        "--write-traces", metavar="FOLDER", help="write the traffic at a GPU's size for quire sim --trace"
    )
    parser.add_argument("--peer-python", metavar="PATH", help="a Python that has sglang-router, to compare with it")
    parser.add_argument(
        "--simulate", action="store_true", help="simulated servers in virtual time, so that runs repeat exactly"
    )
    parser.add_argument("--cores", type=int, metavar="N", help="with --simulate: that servers share (default 2)")
    parser.add_argument(
        "--slow-server", type=float, metavar="X", help="with --simulate: the last server takes X times as long"
    )
    parser.add_argument("--output-json", metavar="FILE", help="keep every run")
    parser.add_argument("--plot", metavar="FILE", help="draw charts: .svg, .html or .png")


def _run_router(args: argparse.Namespace) -> int:
    import asyncio
    import dataclasses
    import json
    from pathlib import Path

    from quire.bench.plots import check_plot, write_charts
    from quire.bench.router import TRAFFICS, as_table, charts, measure, summarize, trace_rows

    for name in ("servers", "repeats", "concurrency", "output_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be a whole number >= 1, got {getattr(args, name)}")
    if args.plot:
        check_plot(args.plot)
    if args.write_traces:
        for kind in ("prefix", "skewed", "bursty", "flood"):
            rows = trace_rows(kind, int(2_000 * args.scale))
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            Path(args.write_traces, f"{kind}.jsonl").write_text(lines)
        return 0
    load: dict[str, Any] = {
        "num_servers": args.servers,
        "traffics": args.traffic or TRAFFICS,
        "repeats": args.repeats,
        "scale": args.scale,
        "concurrency": args.concurrency,
        "num_out": args.output_len,
        "tell": lambda text: print(f"quire: {text}", file=sys.stderr, flush=True),
    }
    if args.simulate:
        if args.model_size is not None:
            raise ConfigError("--model-size is of servers that run; simulated ones are of 15m: leave it out")
        if args.peer_python:
            raise ConfigError("--peer-python names a program, and with --simulate none runs: leave one of them out")
        with needs_server("quire bench router"):
            from quire.sim.router_bench import simulate
        num_cores = 2 if args.cores is None else args.cores
        found = simulate(**load, num_cores=num_cores, slow=1.0 if args.slow_server is None else args.slow_server)
    elif args.cores is not None or args.slow_server is not None:
        raise ConfigError("--cores and --slow-server are of simulated servers: add --simulate")
    else:
        found = asyncio.run(measure(**load, model_size=args.model_size or "15m", peer_python=args.peer_python))
    rows = summarize(found)
    print(as_table(rows))
    if args.output_json:
        runs = [dataclasses.asdict(one) for one in found]
        Path(args.output_json).write_text(json.dumps({"rows": rows, "runs": runs}, indent=1))
    if args.plot:
        write_charts(args.plot, charts(rows), "quire bench router")
    return 0
