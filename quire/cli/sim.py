"""`quire sim`: traffic through simulated engines and a router, in virtual time."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from quire.cli.options import add_engine_flags, engine_config
from quire.cli.parser import WideHelp
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.sim.devices import DEVICES, LINK_PIECES, device_named, read_devices
from quire.sim.policies import POLICIES


def add_parser(subparsers: Any) -> None:
    from quire.bench.jobs import add_workload_flags

    parser = subparsers.add_parser(
        "sim",
        help="predict throughput and latency without the hardware",
        description="The real scheduler, block manager and router on simulated devices, in virtual time. Nothing is "
        "loaded and nothing is computed: steps take what a recorded profile or arithmetic says.",
        usage="quire sim [WORKLOAD ...] [flags]",
        epilog="examples:\n"
        "  quire sim sharegpt --model llama-3.1-8b --gpu h200\n"
        "  quire sim --trace day.jsonl --model llama-3.1-70b --gpu h100 -tp 4 --replicas 16 --policy least-loaded\n"
        "  quire bench profile lab16 mixed64 prefill512 --output-json here.json\n"
        "  quire sim mixed64 --profile here.json\n"
        "  quire sim --validate h200\n\n"
        f"GPUs known by name: {', '.join(DEVICES)}",
        formatter_class=WideHelp,
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument("--gpu", metavar="NAME", default="h200", help="a GPU by name (default h200)")
    where.add_argument("--devices", metavar="FILE", help="JSON: other GPUs, or other numbers for known ones")
    where.add_argument("--profile", metavar="FILE", help="the machine that quire bench profile --output-json recorded")
    where.add_argument("-dp", "--replicas", "--data-parallel-size", type=int, default=1, metavar="N", help="replicas")
    where.add_argument(
        "--cores", type=int, metavar="N", help="with --profile: replicas of one thread share so many cores"
    )
    where.add_argument("--roles", nargs="+", metavar="ROLE", help="of each replica: prefill, decode or both")
    where.add_argument(
        "--link-gbs", type=float, default=50.0, metavar="GB/S", help="at which blocks leave a replica (default 50)"
    )
    where.add_argument(
        "--link-pieces",
        type=int,
        default=LINK_PIECES,
        metavar="N",
        help="of a prompt's chunk, sent as they are computed: the model's layers, as engines leave one of them behind "
        f"(default {LINK_PIECES}), or 1",
    )
    where.add_argument("--policy", default="first-token", metavar="NAME", help=f"of the router: {', '.join(POLICIES)}")
    where.add_argument("--front-ms", type=float, metavar="MS", help="HTTP and tokenizing before and behind the engine")
    add_workload_flags(parser, default="sharegpt")
    traffic = parser.add_argument_group("more traffic")
    traffic.add_argument(
        "--trace", metavar="FILE", help="JSONL: arrival, prompt_len, output_len, prefix_id, prefix_len"
    )
    traffic.add_argument("--duration", type=float, metavar="S", help="as many requests as come in so many seconds")
    parser.add_argument("--output-json", metavar="FILE", help="keep every number, as quire bench does")
    parser.add_argument("--plot", metavar="FILE", help="charts (.svg, .html, .png, .pdf)")
    parser.add_argument(
        "--validate",
        metavar="WHAT",
        help="predictions beside measurements: h200 (recorded); live, an engine here; served, --replicas here",
    )
    add_engine_flags(parser)
    parser.set_defaults(run=run, default_model=True)


def run(args: argparse.Namespace) -> int:
    from quire.cli.bench import _check_outputs

    _check_outputs(args)
    if args.validate is not None:
        from quire.lab.validation import validate

        return validate(args.validate, engine_config(args), args.replicas, args.output_json)
    from quire.bench.report import BenchFile, RunReport
    from quire.bench.text import show

    reports: list[RunReport] = list(_simulate(args))
    print(show("sim", reports))
    if reports:
        print("\npredicted for {model} on {where}".format_map(reports[0].settings))
    for report in reports:
        speed, wall_s = report.values["events_per_s"], report.values["simulation_wall_s"]
        num = report.values["replicas"]
        print(
            f"quire: simulated {report.seconds:,.1f} s of {num:,.0f} engine{'s' * (num != 1)} in {wall_s:.2f} s: "
            f"{report.values['simulated_steps_per_s']:,.0f} steps/s, {speed:,.0f} events/s",
            file=sys.stderr,
        )
    if args.output_json:
        BenchFile("sim", reports).write(args.output_json)
    if args.plot:
        from quire.bench.plots import plot

        plot(args.plot, "sim", reports)
    return 0 if all(report.completed for report in reports) else 1


# Engine settings that a simulation follows; of a dataset also those that find the tokenizer.
_FOLLOWED = {
    *("model", "seed", "tokenizer", "revision", "download_dir", "dtype", "kv_cache_dtype", "max_model_len"),
    "block_size",
    *("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "watermark", "max_num_seqs"),
    *("max_num_batched_tokens", "long_prefill_token_threshold", "target_step_ms", "smooth_prefill_tokens"),
    *("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"),
}
_DEGREES = {"tensor_parallel_size", "pipeline_parallel_size"}
_WITH_PROFILE = {"model", "seed", "tokenizer", "revision", "download_dir"}


def _check_followed(config: EngineConfig, *, has_profile: bool) -> None:
    for name in sorted(config.given - _DEGREES - (_WITH_PROFILE if has_profile else _FOLLOWED)):
        flag = "--" + name.replace("_", "-")
        if has_profile:
            raise ConfigError(f"{flag}: with --profile the engine is the one that was recorded: leave it out")
        raise ConfigError(f"{flag} is not simulated: leave it out (steps are those of a GPU without it)")


def _simulate(args: argparse.Namespace) -> Any:
    from quire.lab.shapes import read_model_spec
    from quire.lab.simulated import engine_by_arithmetic, engine_by_profile
    from quire.sim.apart import Link
    from quire.sim.fleet import Fleet
    from quire.sim.profile import read_profile

    for name in ("tensor_parallel_size", "pipeline_parallel_size", "replicas"):
        if getattr(args, name) is None:
            setattr(args, name, 1)
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    roles = EngineConfig(data_parallel_size=args.replicas, roles=tuple(args.roles or ())).roles
    if not 0 < args.link_gbs < math.inf:
        raise ConfigError(f"--link-gbs must be more than 0, got {args.link_gbs:g}")
    if args.link_pieces < 1:
        raise ConfigError(f"--link-pieces must be 1 or more, got {args.link_pieces}")
    config = engine_config(args)
    _check_followed(config, has_profile=args.profile is not None)
    is_read_along = args.trace is not None or args.request_rate is not None
    if args.profile:
        if args.tensor_parallel_size > 1 or args.pipeline_parallel_size > 1:
            raise ConfigError("--profile is of one device as it ran: leave -tp and -pp out, or use --gpu")
        engine = engine_by_profile(read_profile(args.profile), is_read_along=is_read_along)
        vocab_size, where = 49_152, args.profile
    else:
        spec = read_model_spec(args.model)
        engine = engine_by_arithmetic(
            config,
            spec,
            device_named(args.gpu, read_devices(args.devices) if args.devices else DEVICES),
            tensor_parallel=args.tensor_parallel_size,
            pipeline_parallel=args.pipeline_parallel_size,
            is_read_along=is_read_along,
        )
        vocab_size = spec.vocab_size
        where = f"{args.replicas} × {args.tensor_parallel_size * args.pipeline_parallel_size} {args.gpu}"
        if args.cores is not None:
            raise ConfigError("--cores is for replicas on the processor of a --profile: a GPU's replicas have one each")
    front_s = engine.front_s if args.front_ms is None else args.front_ms / 1e3
    if not 0 <= front_s < math.inf:
        raise ConfigError(f"--front-ms must be 0 or more, got {args.front_ms:g}")
    for name, requests, parameters in _traffic(args, config, vocab_size, engine.config.scheduler.max_model_len):
        fleet = Fleet(
            config=engine.config,
            cost=engine.cost,
            num_replicas=args.replicas,
            policy=args.policy,
            front_s=front_s,
            num_cores=args.cores,
            roles=roles,
            link=Link(bytes_per_s=args.link_gbs * 1e9, num_pieces=args.link_pieces),
        )
        fleet.run(requests)
        report = fleet.report(name, len(requests))
        report.parameters = parameters
        report.settings = {"model": config.model, "where": where, "policy": args.policy,
                           "num_blocks": engine.config.num_blocks, "block_size": engine.config.block_size}  # fmt: skip
        yield report


def _traffic(args: argparse.Namespace, config: EngineConfig, vocab_size: int, max_len: int) -> Any:
    """(name, requests in order of arrival, parameters) of each workload."""
    from pathlib import Path

    from quire.bench.jobs import check_workload_flags, make_jobs
    from quire.bench.workloads import arrival_times
    from quire.cli.bench import _encoder
    from quire.sim.traffic import from_workload, read_trace

    if args.duration is not None:
        if args.request_rate is None or not math.isfinite(args.request_rate) or args.num_prompts is not None:
            raise ConfigError("--duration needs --request-rate, and takes the place of --num-prompts")
        if not args.duration * args.request_rate >= 1:
            raise ConfigError(f"no request comes in --duration {args.duration:g} at {args.request_rate:g} a second")
        args.num_prompts = int(args.duration * args.request_rate)
    if args.trace is not None:
        if args.workloads or args.dataset or args.duration is not None:
            raise ConfigError("--trace brings its own requests: leave the workload, --dataset and --duration out")
        requests = read_trace(args.trace)[: args.num_prompts]
        if args.request_rate is not None:
            times = arrival_times(len(requests), args.request_rate, burstiness=args.burstiness, seed=args.seed or 0)
            requests = [request.at(at) for request, at in zip(requests, times, strict=True)]
        yield Path(args.trace).stem, requests, {"trace": args.trace, "num": len(requests)}
        return
    check_workload_flags(args)
    encode = _encoder(config) if args.dataset else None
    for job in make_jobs(args, vocab_size=vocab_size, max_model_len=max_len, encode=encode):
        yield job.name, from_workload(job.workload, job.arrivals), job.parameters
