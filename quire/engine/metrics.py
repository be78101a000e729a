"""Numbers by their Prometheus names: vLLM's where it has one, so that its dashboards read them; ours otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine.stats import Metric

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine


def collect_metrics(engine: LLMEngine) -> list[Metric]:
    """A reading of everything that is counted."""
    stats, scheduler, kv = engine.stats, engine.core.scheduler, engine.core.kv.stats
    found = [
        Metric("vllm:num_requests_running", "gauge", scheduler.num_running),
        Metric("vllm:num_requests_waiting", "gauge", scheduler.num_waiting),
        Metric("vllm:kv_cache_usage_perc", "gauge", kv.occupancy),
        Metric("vllm:prompt_tokens_total", "counter", stats.prompt_tokens),
        Metric("vllm:prompt_tokens_cached_total", "counter", stats.cached_prompt_tokens),
        Metric("vllm:generation_tokens_total", "counter", stats.generation_tokens),
        Metric("vllm:num_preemptions_total", "counter", scheduler.stats.num_preemptions),
        Metric("vllm:prefix_cache_queries_total", "counter", kv.prefix.num_query_tokens),
        Metric("vllm:prefix_cache_hits_total", "counter", kv.prefix.num_hit_tokens),
    ]
    found += [
        Metric("vllm:request_success_total", "counter", count, {"finished_reason": reason})
        for reason, count in sorted(stats.finished.items())
    ]
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
        "recomputed_tokens_total": ("counter", scheduler.stats.num_recomputed_tokens),
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
    split = {"prepare": stats.prepare_s, "forward": stats.forward_s, "sample": stats.sample_s, "all": stats.busy_s}
    found += [Metric("quire:step_seconds_total", "counter", seconds, {"part": part}) for part, seconds in split.items()]
    host = engine.core.host
    loop = {"schedule": host.schedule_s, "submit": host.submit_s, "collect": host.collect_s, "update": host.update_s}
    found += [Metric("quire:host_seconds_total", "counter", seconds, {"part": part}) for part, seconds in loop.items()]
    graphs = getattr(engine.core.executor, "graphs", None)
    if graphs is not None:
        found.append(Metric("quire:graph_captures_total", "counter", graphs.num_captures))
    return found
