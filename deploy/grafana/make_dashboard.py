"""Writes quire.json, the Grafana dashboard, which is easier to read and change here than there.

python deploy/grafana/make_dashboard.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("quire.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid

Query = tuple[str, str]  # PromQL, legend

# Every selector is written {$s}: of the chosen models and instances.
SELECTOR = 'model_name=~"$model", instance=~"$instance"'


def rate(name: str, by: str = "", **labels: str) -> str:
    more = "".join(f', {label}="{value}"' for label, value in labels.items())
    return f"sum{by and f' by ({by})'}(rate({name}{{$s{more}}}[$__rate_interval]))"


def quantiles(name: str, shares: tuple[float, ...] = (0.5, 0.9, 0.99)) -> list[Query]:
    return [
        (f"histogram_quantile({share:g}, {rate(name + '_bucket', by='le')})", f"p{share * 100:g}") for share in shares
    ]


def mean(name: str) -> str:
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def gauge(name: str, how: str = "sum", by: str = "") -> str:
    return f"{how}{by and f' by ({by})'}({name}{{$s}})"


def panel(
    title: str,
    help_: str,
    *queries: Query,
    unit: str = "short",
    kind: str = "timeseries",
    stacked: bool = False,
    width: int = 8,
    height: int = 8,
    **options: Any,
) -> dict[str, Any]:
    custom = {"fillOpacity": 25 if stacked else 8, "lineWidth": 1, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal"}
    defaults: dict[str, Any] = {"unit": unit, "min": 0} | options
    if kind == "timeseries":
        defaults["custom"] = custom
    found: dict[str, Any] = {
        "type": kind,
        "title": title,
        "description": help_,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expr.replace("$s", SELECTOR),
                "legendFormat": legend,
                "format": "heatmap" if kind == "heatmap" else "time_series",
            }
            for i, (expr, legend) in enumerate(queries)
        ],
        "gridPos": {"w": width, "h": height},
    }
    if kind == "timeseries":
        found["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif kind == "stat":
        found["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    elif kind == "heatmap":
        found["options"] = {"calculate": False, "yAxis": {"unit": unit}, "color": {"scheme": "Blues"}}
    return found


def stat(title: str, help_: str, expr: str, unit: str = "short", **options: Any) -> dict[str, Any]:
    return panel(title, help_, (expr, ""), unit=unit, kind="stat", width=3, height=4, **options)


def steps(*bounds: tuple[float | None, str]) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in bounds]}


STATES = [("ready", "green"), ("starting", "blue"), ("stuck", "red"), ("dead", "red")]
STATE = "max({})".format(" or ".join(f'{i} * quire:engine_state{{$s, state="{s}"}}' for i, (s, _) in enumerate(STATES)))
STATE_NAMES = [
    {"type": "value", "options": {str(i): {"text": s, "color": color} for i, (s, color) in enumerate(STATES)}}
]
BROWNOUT_NAMES = [
    {
        "type": "value",
        "options": {
            "0": {"text": "none", "color": "green"},
            "1": {"text": "smaller prefills", "color": "yellow"},
            "2": {"text": "shorter answers", "color": "orange"},
            "3": {"text": "refusing", "color": "red"},
        },
    }
]

ROWS: dict[str, list[dict[str, Any]]] = {
    "Now": [
        stat("Engine", "What the engine says of itself.", STATE, mappings=STATE_NAMES),
        stat("Running", "Sequences that hold blocks.", gauge("vllm:num_requests_running")),
        stat("Waiting", "Sequences in the queue.", gauge("vllm:num_requests_waiting")),
        stat(
            "KV blocks held",
            "Over 95 % with a queue means that memory is the limit.",
            gauge("vllm:kv_cache_usage_perc", "max"),
            "percentunit",
            thresholds=steps((None, "green"), (0.85, "yellow"), (0.95, "red")),
            max=1,
        ),
        stat("Output tokens/s", "Of all requests together.", rate("vllm:generation_tokens_total")),
        stat(
            "First token p99",
            "From arrival.",
            quantiles("vllm:time_to_first_token_seconds", (0.99,))[0][0],
            "s",
        ),
        stat("Refused/s", "429 and other refusals.", rate("quire:requests_refused_total"), "reqps"),
        stat("Brownout", "What is held back.", gauge("quire:brownout_level", "max"), mappings=BROWNOUT_NAMES),
    ],
    "Latency": [
        panel(
            "First token",
            "From a request's arrival to its first token: queue, then prefill.",
            *quantiles("vllm:time_to_first_token_seconds"),
            unit="s",
        ),
        panel(
            "Between tokens",
            "Between two tokens of one sequence: what a reader sees as speed.",
            *quantiles("vllm:inter_token_latency_seconds"),
            unit="s",
        ),
        panel(
            "Whole request",
            "From arrival to end.",
            *quantiles("vllm:e2e_request_latency_seconds"),
            unit="s",
        ),
        panel(
            "Where a request's time goes (mean)",
            "Queue: waiting for room. Prefill: its prompt runs. Decode: its tokens come.",
            (mean("vllm:request_queue_time_seconds"), "queue"),
            (mean("vllm:request_prefill_time_seconds"), "prefill"),
            (mean("vllm:request_decode_time_seconds"), "decode"),
            unit="s",
            stacked=True,
        ),
        panel(
            "Time to first token, all of it",
            "Two bands often mean cached and uncached prompts.",
            (
                "sum by (le)(increase(vllm:time_to_first_token_seconds_bucket{$s}[$__rate_interval]))",
                "{{le}}",
            ),
            kind="heatmap",
            unit="s",
        ),
        panel(
            "Queue time",
            "What admission and fairness make of it.",
            *quantiles("vllm:request_queue_time_seconds"),
            unit="s",
        ),
    ],
    "Traffic": [
        panel(
            "Tokens/s",
            "Prompt tokens that the cache had cost nothing to compute.",
            (f"{rate('vllm:prompt_tokens_total')} - {rate('vllm:prompt_tokens_cached_total')}", "prompt, computed"),
            (rate("vllm:prompt_tokens_cached_total"), "prompt, cached"),
            (rate("vllm:generation_tokens_total"), "output"),
        ),
        panel(
            "Ended sequences/s, by why",
            "abort: the reader left. error: a deadline passed, or the engine gave it up.",
            (rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}"),
            unit="reqps",
        ),
        panel(
            "Running and waiting",
            "Waiting while blocks are free means that max_num_seqs or the step's budget is the limit.",
            (gauge("vllm:num_requests_running"), "running"),
            (gauge("vllm:num_requests_waiting"), "waiting"),
        ),
        panel(
            "Refused/s, by why",
            "waiting_requests and waiting_tokens are the caps; brownout is memory.",
            (rate("quire:requests_refused_total", by="reason"), "{{reason}}"),
            unit="reqps",
        ),
        panel(
            "Prompt length",
            "Tokens.",
            *quantiles("vllm:request_prompt_tokens", (0.5, 0.95)),
        ),
        panel(
            "Output length",
            "Tokens.",
            *quantiles("vllm:request_generation_tokens", (0.5, 0.95)),
        ),
    ],
    "KV blocks": [
        panel(
            "Blocks by state",
            "Cached blocks are reused when free ones run out: a pool without free blocks is not full.",
            (gauge("quire:kv_blocks_used"), "in use"),
            (gauge("quire:kv_blocks_in_transit"), "in transit"),
            (gauge("quire:kv_blocks_cached"), "cached"),
            (gauge("quire:kv_blocks_free"), "free"),
            stacked=True,
        ),
        panel(
            "Prefix cache hits",
            "Share of prompt tokens found.",
            (f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}", "hit rate"),
            unit="percentunit",
            max=1,
        ),
        panel(
            "Lookups/s, by outcome",
            "evicted: was cached once and had to go. Many of these mean that the cache is too small.",
            (rate("quire:prefix_lookups_total", by="outcome"), "{{outcome}}"),
            stacked=True,
        ),
        panel(
            "Block churn",
            "Blocks that come into use, leave it, or are evicted, per second.",
            (rate("quire:kv_blocks_allocated_total"), "allocated"),
            (rate("quire:kv_blocks_freed_total"), "freed"),
            (rate("quire:kv_evictions_total"), "evicted"),
            (rate("quire:kv_copies_total"), "copied on write"),
        ),
        panel(
            "Exhaustion and preemptions/s",
            "A growth that found no block makes someone give up theirs.",
            (rate("quire:kv_allocation_failures_total"), "growths without a block"),
            (rate("quire:preemptions_total", by="kind"), "preempted: {{kind}}"),
        ),
        panel(
            "What preemption costs",
            "Tokens computed again, and bytes moved to and from the host.",
            (rate("quire:recomputed_tokens_total"), "tokens computed again/s"),
            (rate("quire:swap_bytes_total", by="direction"), "bytes swapped {{direction}}/s"),
        ),
        panel(
            "Waste",
            "Slots of held blocks without a token: at most one block's end per sequence.",
            (gauge("quire:kv_waste_percent", "max"), "% of slots held"),
            unit="percent",
        ),
    ],
    "Engine": [
        panel(
            "Device use",
            "Share of time in which a step runs, on the device's clock.",
            (rate("quire:step_seconds_total", part="all"), "busy"),
            unit="percentunit",
            max=1,
        ),
        panel(
            "A step's time, by part",
            "Mean of the steps.",
            *(
                (f"{rate('quire:step_seconds_total', part=part)} / {rate('quire:steps_total')}", part)
                for part in ("prepare", "forward", "sample")
            ),
            unit="s",
            stacked=True,
        ),
        panel(
            "The loop's time per step, by part",
            "collect waits for the device; the others are Python's own.",
            *(
                (f"{rate('quire:host_seconds_total', part=part)} / {rate('quire:steps_total')}", part)
                for part in ("schedule", "submit", "collect", "update")
            ),
            unit="s",
            stacked=True,
        ),
        panel(
            "Tokens per step",
            "How full the batches are.",
            *quantiles("vllm:iteration_tokens_total", (0.5, 0.95)),
        ),
        panel(
            "CUDA graph captures",
            "Flat after the first minutes; each one stalls a step.",
            (gauge("quire:graph_captures_total"), "captured since start"),
        ),
        panel(
            "Device memory",
            "By anyone. On a CPU there is none: see Process.",
            (gauge("quire:device_memory_used_bytes"), "used"),
            (gauge("quire:device_memory_total_bytes"), "there is"),
            unit="bytes",
        ),
        panel(
            "Brownout level",
            "1 smaller prefills, 2 shorter answers for new requests, 3 no new ones.",
            (gauge("quire:brownout_level", "max"), "level"),
            max=3,
        ),
        panel(
            "Age of the engine's numbers",
            "Grows while a step hangs.",
            (gauge("quire:engine_metrics_age_seconds", "max"), "age"),
            unit="s",
        ),
    ],
    "Tenants and process": [
        panel(
            "Tokens/s, by tenant",
            "Fairness shares what is scarce; a tenant alone may have all of it.",
            (rate("quire:tenant_tokens_total", by="tenant"), "{{tenant}}"),
            stacked=True,
        ),
        panel(
            "Waiting, by tenant",
            "Whose requests wait.",
            (gauge("quire:tenant_requests_waiting", by="tenant"), "{{tenant}}"),
            stacked=True,
        ),
        panel(
            "HTTP process",
            "Its memory; steady under steady load.",
            ('sum(process_resident_memory_bytes{instance=~"$instance"})', "resident"),
            unit="bytes",
        ),
    ],
}


def variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(vllm:request_params_n_count, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def layout() -> list[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        x, y, height = 0, y + 1, 0
        for member in members:
            place = member["gridPos"]
            if x + place["w"] > WIDTH:
                x, y, height = 0, y + height, 0
            member["gridPos"] = {"x": x, "y": y} | place
            x, height = x + place["w"], max(height, place["h"])
            panels.append(member)
        y += height
    return [{"id": i} | found for i, found in enumerate(panels, 1)]


def dashboard() -> dict[str, Any]:
    return {
        "uid": "quire",
        "title": "Quire",
        "tags": ["quire", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "data source"},
                variable("model", "model_name"),
                variable("instance", "instance"),
            ]
        },
        "annotations": {"list": []},
        "panels": layout(),
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
