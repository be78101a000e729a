"""Numbers by their Prometheus names: vLLM's where it has one, so that its dashboards read them; ours otherwise."""

from __future__ import annotations

import itertools

from quire.engine.core import EngineCore
from quire.engine.stats import STEP_TOKEN_BOUNDS, Metric, RequestStats, StepStats


def step_metrics(core: EngineCore) -> list[Metric]:
    """A reading of everything that is counted where the steps run."""
    scheduler, kv, stats = core.scheduler, core.kv.stats, core.stats
    found = [
        Metric("vllm:num_requests_running", "gauge", scheduler.num_running),
        Metric("vllm:num_requests_waiting", "gauge", scheduler.num_waiting),
        Metric("vllm:kv_cache_usage_perc", "gauge", kv.occupancy),
        Metric("vllm:generation_tokens_total", "counter", stats.generation_tokens),
        Metric("vllm:num_preemptions_total", "counter", scheduler.stats.num_preemptions),
        Metric("vllm:prefix_cache_queries_total", "counter", kv.prefix.num_query_tokens),
        Metric("vllm:prefix_cache_hits_total", "counter", kv.prefix.num_hit_tokens),
    ]
    found += _levels(core)
    found += _waiting_by_reason(core) + _step_tokens(stats) + _drafts(core)
    ours: dict[str, tuple[str, float]] = {
        "steps_total": ("counter", stats.num_steps),
        "tokens_per_second": ("gauge", stats.tokens_per_s()),
        "kv_blocks": ("gauge", kv.num_blocks),
        "kv_blocks_free": ("gauge", kv.num_free),
        "kv_blocks_cached": ("gauge", kv.num_cached),
        "kv_blocks_used": ("gauge", kv.num_used),
        "kv_blocks_pinned": ("gauge", kv.num_pinned),
        "kv_blocks_in_transit": ("gauge", kv.num_in_transit),
        "kv_blocks_available_min": ("gauge", kv.min_available),
        "kv_waste_tokens": ("gauge", kv.internal_waste_tokens),
        "kv_waste_percent": ("gauge", kv.waste_percent),
        "kv_blocks_allocated_total": ("counter", kv.num_allocated),
        "kv_blocks_freed_total": ("counter", kv.num_freed),
        "kv_blocks_allocated_per_second": ("gauge", kv.allocated_per_s),
        "kv_blocks_freed_per_second": ("gauge", kv.freed_per_s),
        "kv_evictions_total": ("counter", kv.num_evictions),
        "kv_forks_total": ("counter", kv.num_forks),
        "kv_copies_total": ("counter", kv.num_copies),
        "kv_swapped_out_blocks_total": ("counter", kv.num_swapped_out_blocks),
        "kv_swapped_in_blocks_total": ("counter", kv.num_swapped_in_blocks),
        "kv_allocation_failures_total": ("counter", kv.num_allocation_failures),
        "preemptions_for_tenants_total": ("counter", scheduler.stats.num_yields),
        "recomputed_tokens_total": ("counter", scheduler.stats.num_recomputed_tokens),
        "num_waiting_tokens": ("gauge", scheduler.num_waiting_tokens),
    }
    found += [Metric(f"quire:{name}", kind, value) for name, (kind, value) in ours.items()]
    found += [
        Metric("quire:preemptions_total", "counter", scheduler.stats.num_recompute_preemptions, {"kind": "recompute"}),
        Metric("quire:preemptions_total", "counter", scheduler.stats.num_swap_preemptions, {"kind": "swap"}),
    ]
    found += [
        Metric("quire:prefix_lookups_total", "counter", count, {"outcome": outcome.value})
        for outcome, count in kv.prefix.outcomes.items()
    ]
    found += [
        Metric(name, "gauge", count, {"tenant": tenant})
        for tenant, load in scheduler.tenant_loads.items()
        if tenant
        for name, count in (
            ("quire:tenant_requests_waiting", load.num_waiting),
            ("quire:tenant_requests_running", load.num_running),
        )
    ]
    split = {"prepare": stats.prepare_s, "forward": stats.forward_s, "sample": stats.sample_s, "all": stats.busy_s}
    if stats.processors_s:
        split["logits_processors"] = stats.processors_s  # part of sample
    found += [Metric("quire:step_seconds_total", "counter", seconds, {"part": part}) for part, seconds in split.items()]
    host = core.host
    loop = {"schedule": host.schedule_s, "submit": host.submit_s, "collect": host.collect_s, "update": host.update_s}
    found += [Metric("quire:host_seconds_total", "counter", seconds, {"part": part}) for part, seconds in loop.items()]
    return found + _device(core)


def request_metrics(stats: RequestStats) -> list[Metric]:
    """A reading of everything that is counted where the text is made."""
    found = [
        Metric("vllm:prompt_tokens_total", "counter", stats.prompt_tokens),
        Metric("vllm:prompt_tokens_cached_total", "counter", stats.cached_prompt_tokens),
    ]
    found += [
        Metric("vllm:request_success_total", "counter", count, {"finished_reason": reason})
        for reason, count in sorted(stats.finished.items())
    ]
    return found


# By the name that a level's usage has: the metric, and its kind.
_LEVEL_METRICS = {
    "num_blocks": ("quire:kv_level_blocks", "gauge"),
    "num_stored": ("quire:kv_level_stored_blocks_total", "counter"),
    "num_loaded": ("quire:kv_level_loaded_blocks_total", "counter"),
    "num_missing": ("quire:kv_level_missing_blocks_total", "counter"),
    "num_rejected": ("quire:kv_level_rejected_total", "counter"),
    "num_errors": ("quire:kv_level_errors_total", "counter"),
    "moved_bytes": ("quire:kv_level_moved_bytes_total", "counter"),
    "oldest_s": ("quire:kv_level_oldest_seconds", "gauge"),
}


def _levels(core: EngineCore) -> list[Metric]:
    """Levels below the device, where there are any."""
    tiers = core.kv.tiers
    if tiers is None:
        return []
    found = [
        Metric("vllm:external_prefix_cache_queries_total", "counter", tiers.counters.num_queries),
        Metric("vllm:external_prefix_cache_hits_total", "counter", tiers.counters.num_hits),
        Metric("quire:kv_blocks_lost_total", "counter", tiers.counters.num_lost),
        Metric("quire:num_requests_loading", "gauge", core.scheduler.num_loading),
    ]
    for usage in tiers.usage():
        labels = {"level": str(usage["level"])}
        found += [
            Metric(name, kind, float(usage[key]), labels)
            for key, (name, kind) in _LEVEL_METRICS.items()
            if key in usage
        ]
    return found


def _waiting_by_reason(core: EngineCore) -> list[Metric]:
    """vLLM's two reasons. Requests wait for capacity alone here, whatever they lack; none is deferred."""
    num_waiting = sum(core.scheduler.waiting_by_reason.values())
    name = "vllm:num_requests_waiting_by_reason"
    return [
        Metric(name, "gauge", num_waiting, {"reason": "capacity"}),
        Metric(name, "gauge", 0, {"reason": "deferred"}),
    ]


def _step_tokens(stats: StepStats) -> list[Metric]:
    name, bounds = "vllm:iteration_tokens_total", [*(f"{float(b)}" for b in STEP_TOKEN_BOUNDS), "+Inf"]
    found = [
        Metric(name, "histogram", count, {"le": bound})
        for bound, count in zip(bounds, itertools.accumulate(stats.steps_by_tokens), strict=True)
    ]
    return [*found, Metric(name, "histogram", stats.step_tokens)]


def _drafts(core: EngineCore) -> list[Metric]:
    """Counts of drafts, where something drafts."""
    if core.scheduler.drafter is None:
        return []
    stats = core.scheduler.stats
    return [
        Metric("vllm:spec_decode_num_drafts_total", "counter", stats.num_drafts),
        Metric("vllm:spec_decode_num_draft_tokens_total", "counter", stats.num_draft_tokens),
        Metric("vllm:spec_decode_num_accepted_tokens_total", "counter", stats.num_accepted_tokens),
        *(
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", count, {"position": str(position)})
            for position, count in enumerate(stats.num_accepted_by_depth)
        ),
    ]


def _device(core: EngineCore) -> list[Metric]:
    """Numbers that only some executors have."""
    found = []
    graphs = getattr(core.executor, "graphs", None)
    if graphs is not None:
        found.append(Metric("quire:graph_captures_total", "counter", graphs.num_captures))
    memory = getattr(core.executor, "device_memory_bytes", None)
    if memory is not None and (reading := memory()) is not None:
        used, total = reading
        found.append(Metric("quire:device_memory_used_bytes", "gauge", used))
        found.append(Metric("quire:device_memory_total_bytes", "gauge", total))
    return found
