"""`quire plan`: what fits where, with nothing loaded; the formulas stand there with the numbers in them."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from typing import Any

from quire.cli.options import MODEL_FLAGS, RUNTIME_FLAGS, SHORT
from quire.cli.plan_text import render
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.gpu_record import GpuRecord, recall_gpu
from quire.lab.capacity import Limits
from quire.lab.planner import make_plan
from quire.lab.shapes import SHAPES, gguf_file_bytes, read_model_spec
from quire.lab.traffic import Kind
from quire.sim.devices import DEVICES, device_named, read_devices
from quire.sizes import read_size

_ENGINE_FLAGS: dict[str, tuple[Any, str]] = {
    name: (MODEL_FLAGS | RUNTIME_FLAGS)[name]
    for name in (
        *("dtype", "quantization", "kv_cache_dtype", "block_size", "tensor_parallel_size", "pipeline_parallel_size"),
        *("max_num_seqs", "max_num_batched_tokens", "max_loras", "max_lora_rank", "gpu_memory_utilization"),
    )
} | {
    "max_model_len": (int, "longest sequence"),
    "kv_cache_memory_bytes": (str, "size of the KV cache, such as 8GiB: then the block count is exact"),
}
_SWITCHES = ("enforce_eager", "enable_lora")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="what fits in memory: blocks, lengths, sequences at once",
        description="KV memory by arithmetic: bytes per token and block, how many blocks, how long, how many at once, "
        "and which flags to set. No weights are loaded; of a hub id the config is fetched, of a GGUF one the file.",
        epilog="examples:\n"
        "  quire plan\n"
        "  quire plan llama-3.1-8b --gpu h100 --prompt-len 1024 --output-len 256\n"
        "  quire plan ./my-model --memory 24GiB --mix 200:400:3 --mix 6000:300:1 --concurrency 64\n"
        "  quire plan llama-3.1-8b --rate 1000000/min --slo ttft=500ms,itl=50ms\n\n"
        f"shapes known by name: {', '.join(SHAPES)}\nGPUs known by name: {', '.join(DEVICES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2",
        help="alias, known shape, directory, config.json, GGUF file or hub id, also owner/name:Q4_K_M",
    )
    where = parser.add_argument_group("where it runs (default: this machine)")
    where.add_argument("--memory", metavar="SIZE", help="memory of the device: 80GB (10^9), 80GiB or 80G (2^30)")
    where.add_argument("--gpu", metavar="NAME", help="a GPU by name, such as h100")
    where.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="(default: a GPU, if there is one or --memory is given)",
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--prompt-len", type=int, metavar="N", help="tokens of a prompt")
    traffic.add_argument("--output-len", type=int, metavar="N", help="tokens generated")
    traffic.add_argument(
        "--mix",
        action="append",
        default=[],
        metavar="PROMPT:OUTPUT[:SHARE]",
        help="one kind of request and its share of all; may be repeated",
    )
    traffic.add_argument("--concurrency", type=int, metavar="N", help="how many should run at once")
    fleet = parser.add_argument_group("how many devices serve a rate of requests")
    fleet.add_argument("--rate", metavar="N/UNIT", help="requests: 50/s, 1000000/min or 2e6/h; needs --slo")
    fleet.add_argument("--slo", metavar="LIMITS", help="for 99 of 100 requests, such as ttft=500ms,itl=50ms")
    fleet.add_argument("--devices", metavar="FILE", help="JSON: prices, other GPUs, or other numbers for known ones")
    fleet.add_argument("--plot", metavar="FILE", help="cost against rate (.svg, .html, .png, .pdf)")
    engine = parser.add_argument_group("engine settings to plan with")
    for name, (kind, text) in _ENGINE_FLAGS.items():
        names = (*SHORT.get(name, ()), "--" + name.replace("_", "-"))
        engine.add_argument(*names, type=kind, metavar=name.upper(), help=text)
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="no CUDA graphs")
    engine.add_argument("--enable-lora", action="store_true", default=None, help="serve adapters, too")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    mix = _mix(args)
    if args.rate is not None or args.slo is not None:
        return _run_capacity(args, mix)
    for name in ("devices", "plot"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} belongs to --rate and --slo: give them too, or leave it out")
    device, memory_bytes, where, record = _device(args)
    values = {name: getattr(args, name) for name in (*_ENGINE_FLAGS, *_SWITCHES)}
    config = EngineConfig(model=args.model, **values)
    _check_device(config, device)

    spec = read_model_spec(args.model)
    _check_mix(mix, config.max_model_len or spec.max_position)
    plan = make_plan(
        config, spec, device=device, memory_bytes=memory_bytes, mix=mix, concurrency=args.concurrency, record=record
    )
    plan.file_bytes = gguf_file_bytes(args.model)
    if args.json:
        print(json.dumps(plan.to_data(), indent=2))
    else:
        print(render(plan, where=where, hub_id=SHAPES[args.model].hub_id if args.model in SHAPES else args.model))
    return 0 if plan.chosen.ledger is not None else 1


def _run_capacity(args: argparse.Namespace, mix: list[Kind]) -> int:
    from quire.bench.plots import check_plot, write_charts
    from quire.lab import capacity

    if args.rate is None or args.slo is None:
        raise ConfigError("--rate and --slo belong together: such as --rate 100/s --slo ttft=500ms,itl=50ms")
    if args.memory is not None or args.concurrency is not None or args.device == "cpu":
        raise ConfigError(
            "--rate chooses among GPUs: leave --memory, --concurrency and --device out, or name one by --gpu"
        )
    rate, limits = read_rate(args.rate), read_limits(args.slo)
    devices = read_devices(args.devices) if args.devices else DEVICES
    if args.gpu is not None:
        device = device_named(args.gpu, devices)
        devices = {device.name: device}
    if args.plot:
        check_plot(args.plot)
    values = {name: getattr(args, name) for name in (*_ENGINE_FLAGS, *_SWITCHES)}
    spec = read_model_spec(args.model)
    longest = max((kind.prompt_len + kind.output_len for kind in mix), default=4096)
    if values["max_model_len"] is None:  # longer ones would take memory for nothing
        values["max_model_len"] = min(spec.max_position, max(4096, longest))
    config = EngineConfig(model=args.model, **values)
    _check_mix(mix, config.max_model_len or spec.max_position)
    found = capacity.plan_capacity(
        config,
        spec,
        list(devices.values()),
        rate=rate,
        limits=limits,
        mix=mix,
        tell=lambda text: print(f"quire: {text}", file=sys.stderr),
    )
    print(json.dumps(found.to_data(), indent=2) if args.json else capacity.as_text(found))
    if args.plot:
        chart = capacity.cost_chart(found)
        write_charts(args.plot, [chart], chart.title)
    return 0


_PER_SECOND = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86400}


def read_rate(text: str) -> float:
    """Requests a second."""
    value, _, unit = text.replace(",", "").replace("_", "").partition("/")
    try:
        rate = float(value) / _PER_SECOND[unit.strip() or "s"]
    except (ValueError, KeyError):
        rate = 0.0
    if not 0 < rate < 1e9:
        raise ConfigError(f"--rate must be requests over a time, such as 50/s, 1000000/min or 2e6/h; got {text!r}")
    return rate


def read_limits(text: str) -> Limits:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        match = re.fullmatch(r"([0-9.]+)\s*(ms|s)", value.strip())
        if name not in ("ttft", "itl") or match is None or not float(match[1]) > 0:
            raise ConfigError(
                f"--slo must name ttft and itl, such as ttft=500ms,itl=50ms or ttft=2s,itl=0.1s; got {text!r}"
            )
        found[name] = float(match[1]) / (1e3 if match[2] == "ms" else 1.0)
    if len(found) < 2:
        raise ConfigError(f"--slo needs both ttft and itl, such as ttft=500ms,itl=50ms; got {text!r}")
    return Limits(found["ttft"], found["itl"])


def _device(args: argparse.Namespace) -> tuple[str, int | None, str, GpuRecord | None]:
    """(cpu or cuda, its bytes where known, what to call it, what an engine found there)."""
    if args.gpu is not None:
        if args.memory is not None:
            raise ConfigError("--gpu and --memory both say how much there is: give one of them")
        if args.device == "cpu":
            raise ConfigError("--gpu names a GPU and --device says cpu: give one of them")
        device = device_named(args.gpu, DEVICES, instead="give --memory instead")
        return "cuda", device.memory_bytes, f"one {args.gpu.upper()}, whose driver reports about", None
    if args.memory is not None:
        try:
            memory = read_size(args.memory)
        except ValueError as error:
            raise ConfigError(f"--memory must be {error}, got {args.memory!r}") from None
        if memory < 1 << 20:
            raise ConfigError(f"--memory {args.memory} is {memory:,} bytes: did you mean {args.memory}GiB?")
        on_cpu = args.device == "cpu"
        return ("cpu", memory, "a CPU with", None) if on_cpu else ("cuda", memory, "a GPU with", None)
    if args.device != "cpu":
        found = local_gpu()
        if found is not None:
            record = recall_gpu(found[0])
            # The driver's tool counts a little that no program can have: an engine that started here knows better.
            return "cuda", record.total_bytes if record else found[1], f"this machine's {found[0]}, with", record
        if args.device == "cuda":
            raise ConfigError("--device cuda, and nvidia-smi finds no GPU here: say --gpu NAME or --memory SIZE")
    return "cpu", None, "this machine's CPU", None


def local_gpu() -> tuple[str, int] | None:
    """Name and bytes of this machine's first GPU, from the driver's own tool; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        name, mebibytes = answer.splitlines()[0].rsplit(",", 1)
        return name.strip(), int(mebibytes) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _mix(args: argparse.Namespace) -> list[Kind]:
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(f"--concurrency must be 1 or more, got {args.concurrency}")
    kinds = []
    for text in args.mix:
        parts = text.split(":")
        try:
            prompt_len, output_len = int(parts[0]), int(parts[1])
            share = float(parts[2]) if len(parts) == 3 else 1.0
            if len(parts) > 3 or min(prompt_len, output_len) < 1 or not 0 < share < 1e9:
                raise ValueError
        except (ValueError, IndexError):
            raise ConfigError(
                f"--mix must be PROMPT:OUTPUT or PROMPT:OUTPUT:SHARE, all above 0, such as 512:128:3; got {text!r}"
            ) from None
        kinds.append(Kind(prompt_len, output_len, share))
    if args.prompt_len is not None or args.output_len is not None:
        if kinds:
            raise ConfigError("--mix and --prompt-len/--output-len both describe the traffic: give one of them")
        if args.prompt_len is None or args.output_len is None:
            raise ConfigError("--prompt-len and --output-len belong together: give both")
        if min(args.prompt_len, args.output_len) < 1:
            raise ConfigError("--prompt-len and --output-len must be 1 or more")
        kinds.append(Kind(args.prompt_len, args.output_len))
    if args.concurrency is not None and not kinds:
        raise ConfigError("--concurrency needs to know of what: give --prompt-len and --output-len, or --mix")
    return kinds


def _check_mix(mix: list[Kind], limit: int) -> None:
    for kind in mix:
        length = kind.prompt_len + kind.output_len
        if length > limit:
            raise ConfigError(
                f"{kind.prompt_len} prompt and {kind.output_len} output tokens are {length}, and the longest sequence "
                f"is {limit}: shorten one of them"
            )


def _check_device(config: EngineConfig, device: str) -> None:
    if device == "cpu" and config.kv_cache_dtype == "fp8":
        raise ConfigError("kv_cache_dtype='fp8' needs a GPU: on a CPU use float16 or bfloat16, which halve float32")
    if device == "cuda" and config.quantization == "int8":
        raise ConfigError("quantization='int8' is for the CPU: use 'fp8', or plan with --device cpu")
    if device == "cpu" and config.quantization == "gguf":
        raise ConfigError("quantization='gguf' is for a GPU: on a CPU a GGUF file's weights stay packed without it")
    if device == "cpu" and config.quantization == "fp8":
        raise ConfigError("quantization='fp8' needs a GPU: use 'int8', or plan with --device cuda")
