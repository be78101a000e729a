"""Runs as text for a terminal: a benchmark's tables, the details of one run, and what changed between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.bench import units
from quire.bench.compare import Comparison, Verdict
from quire.bench.profile import PARTS
from quire.bench.report import RunReport
from quire.bench.units import size, table


def number(value: float | None) -> str:
    """One digit more than in prose: two runs are told apart by it."""
    return units.number(value, 3 if value is None or abs(value) < 10 else 4)


def ms(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


# -- a benchmark


def show(benchmark: str, runs: Sequence[RunReport], *, is_sweep: bool = False) -> str:
    """Tables for people."""
    good = [run for run in runs if run.workload != "failed"]
    failed = [f"failed at {_point(run)}: {next(iter(run.errors))}" for run in runs if run.workload == "failed"]
    if benchmark == "startup":
        blocks = [_startup(run) for run in good]
    elif benchmark == "profile":
        blocks = [_profile(run) for run in good]
    elif benchmark == "speculate":
        blocks = [_speculation(good)]
    elif benchmark == "latency":
        blocks = [_latency(good), *([] if is_sweep else [details(run) for run in good])]
    elif is_sweep:
        blocks = [summary(good)]
    elif benchmark == "prefix":
        blocks = [summary(good), *_prefix(good)]
    else:
        blocks = [*([summary(good)] if len(good) > 1 else []), *(details(run) for run in good)]
    machine = good[0].machine if good else {}
    where = machine.get("gpu") or f"{machine.get('cpus')} cores of {machine.get('cpu')}"
    closing = (
        [f"measured on {where}, {model_name(good[0])}"] if good and good[0].engine not in ("server", "sim") else []
    )
    return "\n\n".join(block for block in [*blocks, *failed, *closing] if block)


def model_name(run: RunReport) -> str:
    name = str(run.settings.get("model", "?"))
    return f"{name} in {run.settings['dtype']}" if "dtype" in run.settings else name


def _point(run: RunReport) -> str:
    return ", ".join(f"{flag}={value}" for flag, value in run.point.items())


def _latency(runs: Sequence[RunReport]) -> str:
    heads = ["batch latency, ms", "iterations", "p50", "p95", "p99", "mean", "max", "out tok/s"]
    rows = []
    for run in runs:
        values = [ms(run.values.get(f"batch_{p}_s")) for p in ("p50", "p95", "p99", "mean", "max")]
        rows.append([run.label, str(len(run.repeats)), *values, number(run.output_tok_s)])
    return table(heads, rows)


def _speculation(runs: Sequence[RunReport]) -> str:
    """Speed against plain decoding: the median of the repeats' ratios, and their range."""
    heads = ["text", "sequences", "drafts", "tok/s", "x plain", "lowest", "highest", "accepted", "a step"]
    rows = []
    for run in runs:
        ratios, drafted = run.repeat_values.get("times_plain", []), run.values.get("draft_tokens", 0.0)
        accepted = f"{100 * run.values['accepted_tokens'] / drafted:.0f} %" if drafted else "-"
        marks = (
            [f"{run.values['times_plain']:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"] if ratios else ["-"] * 3
        )
        a_step = f"{run.values['tokens_per_step']:.2f}"
        rows.append(
            [run.workload, run.point["load"], run.point["drafts"], number(run.output_tok_s), *marks, accepted, a_step]
        )
    return table(heads, rows)


def _prefix(runs: Sequence[RunReport]) -> list[str]:
    """For each workload, what caching brought."""
    blocks = []
    pairs: dict[str, dict[str, RunReport]] = {}
    for run in runs:
        pairs.setdefault(run.workload, {})[run.point["prefix-caching"]] = run
    for name, pair in pairs.items():
        on, off = pair.get("on"), pair.get("off")
        if not (on and off and on.kv and off.kv and on.ttft_s and off.ttft_s):
            continue
        found, asked = on.kv.prefix_hit_tokens, on.kv.prefix_query_tokens
        blocks.append(
            f"{name}: caching found {found:,} of {asked:,} prompt tokens ({100 * on.kv.prefix_hit_rate:.0f} %).\n"
            f"  throughput   {number(off.output_tok_s)} -> {number(on.output_tok_s)} tok/s "
            f"(x {on.output_tok_s / off.output_tok_s:.2f})\n"
            f"  first token  {ms(off.ttft_s.p50)} -> {ms(on.ttft_s.p50)} ms at p50 "
            f"(x {on.ttft_s.p50 / off.ttft_s.p50:.2f})\n"
            f"  peak blocks  {off.kv.peak_blocks:,} -> {on.kv.peak_blocks:,} "
            f"({off.kv.peak_blocks - on.kv.peak_blocks:,} saved by sharing)"
        )
    return blocks


def startup_parts(run: RunReport) -> dict[str, float]:
    """The parts of the time to the first token; what the other parts do not account for is called rest."""
    whole = ("ready_s", "first_token_s")
    parts = {name.removesuffix("_s").replace("_", " "): s for name, s in run.values.items() if name not in whole}
    if "ready_s" not in run.values:
        return parts
    parts["rest"] = max(0.0, run.values["ready_s"] - sum(parts.values()))
    parts["first token"] = run.values["first_token_s"] - run.values["ready_s"]
    return parts


def _startup(run: RunReport) -> str:
    if not run.values:
        return f"{run.label}: interrupted before the first process was ready"
    rows = [[part, f"{seconds:.2f}"] for part, seconds in startup_parts(run).items()]
    rows += [["to ready", f"{run.values['ready_s']:.2f}"], ["to first token", f"{run.values['first_token_s']:.2f}"]]
    all_times = ", ".join(f"{value:.2f}" for value in run.repeat_values.get("first_token_s", []))
    lines = [f"{run.label}: {run.completed} fresh processes, to the first token in {all_times} s; the median's parts:"]
    return "\n".join([*lines, table(["part", "seconds"], rows)])


def profile_parts(run: RunReport) -> dict[str, dict[str, float]]:
    """Kind of step -> part -> milliseconds."""
    kinds: dict[str, dict[str, float]] = {}
    for name, value in run.values.items():
        kind, _, part = name.rpartition(": ")
        part = part.removesuffix("_ms")
        if part in PARTS:
            kinds.setdefault(kind, {})[part] = value
    return {kind: {part: ms for part, ms in split.items() if ms > 0} for kind, split in kinds.items()}


def _profile(run: RunReport) -> str:
    heads = ["kind of step", "steps", "ms", *PARTS]
    rows = []
    for kind, split in profile_parts(run).items():
        total = run.values[f"{kind}: step_ms"]
        cells = [f"{split[part]:.2f} ({100 * split[part] / total:.0f} %)" if part in split else "–" for part in PARTS]
        rows.append([kind, f"{run.values[f'{kind}: steps']:.0f}", f"{total:.2f}", *cells])
    notes = [f"note: {note}" for note in run.notes]
    return "\n".join([f"{run.label}: milliseconds of a step, by kind, those with most time first",
                      table(heads, rows), *notes])  # fmt: skip


# -- runs


def summary(runs: Sequence[RunReport]) -> str:
    """One line a run: how fast, how soon, how full."""
    heads = ["run", "requests", "seconds", "out tok/s", "spread", "prefill/s", "decode/s",
             "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "blocks", "waste"]  # fmt: skip
    rows = []
    for run in runs:
        spread = "–" if run.spread_percent is None else f"{run.spread_percent:.1f} %"
        waste = "–" if run.kv is None else f"{run.kv.waste_percent_mean:.1f} %"
        rows.append([
            run.label, f"{run.completed}/{run.requests}", f"{run.seconds:.2f}", number(run.output_tok_s), spread,
            number(run.prefill_tok_s), number(run.decode_tok_s), ms(run.ttft_s.p50 if run.ttft_s else None),
            ms(run.itl_s.p50 if run.itl_s else None), ms(run.itl_s.p99 if run.itl_s else None),
            "–" if run.kv is None else str(run.kv.peak_blocks), waste,
        ])  # fmt: skip
    return table(heads, rows)


def details(run: RunReport) -> str:
    """Everything about one run, in a few blocks of lines."""
    lines = [f"{run.label}: {run.completed} of {run.requests} requests, {run.prompt_tokens:,} tokens in, "
             f"{run.output_tokens:,} out, {run.seconds:.2f} s"]  # fmt: skip
    if run.interrupted:
        lines[0] += " (interrupted: numbers are of what was done until then)"
    speed = f"  speed      {number(run.output_tok_s)} output tok/s, {number(run.total_tok_s)} with prompts"
    if run.spread_percent is not None:
        values = ", ".join(number(value) for value in run.repeats)
        speed += f"; repeats {values} (spread {run.spread_percent:.1f} %)"
    lines.append(speed)
    if run.prefill_tok_s is not None or run.decode_tok_s is not None:
        width = f" of {run.running_mean:.1f} sequences" if run.running_mean else ""
        rates = f"prefill {number(run.prefill_tok_s)} tok/s, decode {number(run.decode_tok_s)} tok/s"
        lines.append(f"  steps      {rates}; {run.num_steps:,} steps{width}")
    lines += [f"  {text}" for text in _latency_table(run)]
    lines += [f"  {text}" for text in _kv_lines(run)]
    memory = [f"{name} {size(value)}" for name, value in
              (("peak RSS", run.peak_rss_bytes), ("peak GPU", run.peak_gpu_bytes)) if value is not None]  # fmt: skip
    busy = [f"{name} {value:.0f} %" for name, value in
            (("CPU", run.cpu_percent), ("device busy", run.device_percent)) if value is not None]  # fmt: skip
    if memory or busy:
        lines.append(f"  machine    {', '.join(memory + busy)}")
    lines += [f"  {text}" for text in _serving_lines(run)]
    if "padding_waste_percent" in run.values:
        waste, reserved = run.values["padding_waste_percent"], run.values["kv_slots_reserved_peak"]
        lines.append(f"  padding    {waste:.1f} % of the reserved slots stay empty; {reserved:,.0f} reserved at most")
    if run.errors:
        lines.append(f"  errors     {errors_text(run)}")
    lines += [f"  note       {note}" for note in run.notes]
    return "\n".join(lines)


def errors_text(run: RunReport) -> str:
    return ", ".join(f"{count} x {what}" for what, count in run.errors.items())


def _latency_table(run: RunReport) -> list[str]:
    kinds = [
        ("first token (TTFT)", run.ttft_s),
        ("time per output token (TPOT)", run.tpot_s),
        ("inter-token (ITL)", run.itl_s),
        ("end to end (E2EL)", run.e2e_s),
    ]
    rows = [[name, *map(ms, (p.p50, p.p95, p.p99, p.mean, p.max))] for name, p in kinds if p is not None]
    return table(["latency, ms", "p50", "p95", "p99", "mean", "max"], rows).splitlines() if rows else []


def _serving_lines(run: RunReport) -> list[str]:
    """What a load test asks for, and what the server said of itself."""
    values = run.values
    if "req_s" not in values:
        return []
    requests = [f"{number(values['req_s'])}/s"]
    if values["failed_requests"]:
        requests.append(f"{values['failed_requests']:.0f} failed")
    if values["refused_requests"]:
        requests.append(f"{values['refused_requests']:.0f} refused by a full server")
    lines = [f"requests   {', '.join(requests)}"]
    if "goodput_req_s" in values:
        limits = run.parameters.get("goodput")
        in_time = "in time" if limits is None else f"in time ({limits})"
        kept, rate = values["goodput_requests"], values["goodput_req_s"]
        lines.append(f"goodput    {kept:.0f} of {run.requests} requests {in_time}, {number(rate)}/s")
    server = _server_words(values)
    return [*lines, f"server     {', '.join(server)}"] if server else lines


def _server_words(values: dict[str, float]) -> list[str]:
    words = []
    if "server_kv_usage_max" in values:
        words.append(f"KV cache {100 * values['server_kv_usage_max']:.1f} % in use at most")
        words.append(f"{values['server_running_max']:.0f} requests running at most")
        words.append(f"{values['server_waiting_max']:.0f} waiting at most")
    if "server_preemptions" in values:
        count = round(values["server_preemptions"])
        words.append("no preemptions" if not count else f"{count:,} preemption{'s' * (count > 1)}")
    if "server_prefix_hit_rate" in values:
        words.append(f"{100 * values['server_prefix_hit_rate']:.0f} % of prompt tokens from its prefix cache")
    return words


def _kv_lines(run: RunReport) -> list[str]:
    kv = run.kv
    if kv is None:
        return []
    waste = f"waste      {kv.waste_percent_mean:.1f} % of the slots on average, {kv.waste_percent_max:.1f} % at most"
    lines = [
        f"KV cache   {kv.num_blocks:,} blocks of {kv.block_size}: {100 * kv.occupancy_mean:.1f} % in use on average, "
        f"{kv.peak_blocks:,} ({100 * kv.occupancy_max:.1f} %) at most, {kv.min_available:,} free at least",
        *([] if run.engine == "sim" else [waste]),
        f"churn      {kv.blocks_allocated:,} blocks taken, {kv.blocks_freed:,} given back: "
        f"{number(kv.churn_per_s)} per s; {kv.evictions:,} evicted, {kv.copies:,} copied on write",
    ]
    if kv.prefix_hit_tokens:
        lines.append(f"prefix     {kv.prefix_hit_tokens:,} of {kv.prefix_query_tokens:,} prompt tokens were cached "
                     f"({100 * kv.prefix_hit_rate:.0f} %)")  # fmt: skip
    if any(kv.preemptions.values()):
        kinds = ", ".join(f"{count} by {kind}" for kind, count in kv.preemptions.items() if count)
        lines.append(f"preempted  {kinds}; {kv.recomputed_tokens:,} tokens computed again")
    return lines


def comparison(found: Comparison) -> str:
    """The metrics that changed come first; those that stayed the same are one line."""
    told = [c for c in found.changes if c.verdict not in (Verdict.SAME, Verdict.CANNOT_TELL)]
    same = [c.metric for c in found.changes if c.verdict is Verdict.SAME]
    unknown = [c for c in found.changes if c.verdict is Verdict.CANNOT_TELL]
    lines = [f"{found.label} ({found.num_repeats[0]} and {found.num_repeats[1]} repeats)"]
    lines += [f"  different: {text}" for text in found.differences]
    shown = told or unknown
    if shown:
        rows = []
        for change in shown:
            scaled = _scale(change.metric)
            percent = "–" if change.percent is None else f"{change.percent:+.1f} %"
            noise = "–" if change.noise_percent is None else f"± {change.noise_percent:.1f} %"
            rows.append([change.metric, scaled(change.before), scaled(change.after), percent, noise, change.verdict])
        heads = ["metric", "before", "after", "change", "noise", "verdict"]
        lines += [f"  {line}" for line in table(heads, rows).splitlines()]
    if same:
        lines.append(f"  same within noise: {', '.join(same)}")
    if unknown:
        lines.append("  cannot tell: one repeat says nothing about noise; run both with --repeats 3 or more")
    elif not told:
        lines.append("  nothing changed beyond the noise")
    return "\n".join(lines)


def _scale(metric: str) -> Callable[[float], str]:
    if metric.endswith("_bytes"):
        return size
    if metric.endswith("_s") and not metric.endswith(("tok_s", "req_s")):
        return lambda value: f"{ms(value)} ms"
    return number
