"""A plan as text: each number with the formula that made it."""

from __future__ import annotations

from quire.bench.units import aligned
from quire.executor import sizing
from quire.lab.device_plan import DevicePlan, size
from quire.lab.planner import Plan

_LENGTHS = (512, 2048, 8192, 32768, 131072)


def render(plan: Plan, *, where: str, hub_id: str) -> str:
    """The whole report. `where` names the device, `hub_id` is the model as the engine would be told it."""
    memory = f" {size(plan.memory_bytes)}" if plan.memory_bytes is not None else ""
    lines = [f"{plan.model} on {where}{memory}", "", *_model(plan), "", *_kv(plan), "", *_memory(plan)]
    if plan.chosen.ledger is not None:
        lines += ["", *_what_fits(plan)]
    lines += ["", *_choices(plan), "", *_flags(plan, hub_id)]
    return "\n".join(lines)


def _model(plan: Plan) -> list[str]:
    spec = plan.spec
    tied = "tied to the output" if spec.tie_embeddings else "apart from the output's"
    return [
        "Model",
        f"  {spec.architecture}: {spec.num_layers} layers of {spec.hidden_size}, {spec.num_heads} heads and "
        f"{spec.num_kv_heads} KV heads of {spec.head_dim}",
        f"  vocabulary of {spec.vocab_size:,} ({tied}), {spec.max_position:,} positions",
    ]


def _kv(plan: Plan) -> list[str]:
    spec, chosen, block_size = plan.held_spec, plan.chosen, plan.config.block_size
    value_bytes = sizing.DTYPE_BYTES[chosen.kv_dtype]
    layout = chosen.layout
    block = f"{block_size} tokens × {chosen.token_bytes:,} B"
    if len(layout.windows) > 1:
        block = f"{block_size} tokens of {layout.num_slots} layers, which {len(layout.windows)} groups of layers share"
    whose = "" if plan.config.num_ranks == 1 else ", of the rank with the largest share"
    return [
        f"KV cache in {chosen.kv_dtype}{whose}",
        f"  a token   2 (K, V) × {spec.num_layers} layers × {spec.num_kv_heads} KV heads × {spec.head_dim} × "
        f"{value_bytes} B = {chosen.token_bytes:,} B  ({size(chosen.token_bytes)})",
        f"  a block   {block} = {chosen.block_bytes:,} B  ({size(chosen.block_bytes)})",
    ]


def _memory(plan: Plan) -> list[str]:
    chosen, config, spec = plan.chosen, plan.config, plan.held_spec
    values = sizing.num_matrix_values(spec)
    value_bytes = sizing.matrix_value_bytes(plan.weight_dtype)
    is_narrow = plan.weight_dtype in ("fp8", "w4a16", "w8a16")
    rest = "the vocabulary's other bytes, scales, norms" if is_narrow else "norms"
    weights = (
        f"{values:,} × {value_bytes:g} B ({plan.weight_dtype}) + {rest} and rotary tables "
        f"{size(chosen.weight_bytes - values * value_bytes)}"
    )
    if plan.keeps_file_packed:
        weights += ", unpacked"
    step = f"at most {plan.max_num_batched_tokens:,} tokens, logits for {plan.max_num_seqs:,} sequences"
    entries: list[tuple[str, str, int]] = []
    fixed = config.kv_cache_memory_bytes
    if plan.device == "cuda" and plan.memory_bytes is not None and fixed is None:
        share = config.gpu_memory_utilization
        budget = int(plan.memory_bytes * share)
        entries.append((" ", f"{size(plan.memory_bytes)} × gpu_memory_utilization {share:g}", budget))
    entries.append(
        ("-" if plan.device == "cuda" and fixed is None else " ", f"weights: {weights}", chosen.weight_bytes)
    )
    sign = entries[-1][0]
    if chosen.adapter_bytes:
        slots = f"{config.max_loras} adapters of rank {config.max_lora_rank}"
        entries.append((sign, f"slots of {slots}", chosen.adapter_bytes))
    entries.append((sign, f"largest step: {step}", chosen.step_bytes))
    if chosen.graph_bytes:
        entries.append((sign, "captured steps", chosen.graph_bytes))
    if chosen.batch_bytes:
        entries.append((sign, f"tokens and block tables of {plan.max_num_seqs:,} sequences", chosen.batch_bytes))
    if chosen.driver_bytes:
        origin = "about" if plan.record is None else "as the last start here found"
        entries.append((sign, f"driver and kernels, {origin}", chosen.driver_bytes))
    if chosen.kv_budget_bytes is not None:
        entries.append(("=" if sign == "-" else " ", f"KV cache: {_budget_origin(plan)}", chosen.kv_budget_bytes))
    width = max(len(text) for _, text, _ in entries)
    lines = ["Memory", *(f"  {mark} {text:<{width}}  {size(b):>11}" for mark, text, b in entries)]
    if plan.keeps_file_packed:
        assert plan.file_bytes is not None
        lines.append(
            f"  packed    a CPU keeps the file's blocks of 4 and 8 bits as they are: weights near its "
            f"{size(plan.file_bytes)} if it has no others"
        )
    if chosen.ledger is None:
        return [*lines, f"  does not fit: {chosen.problem}"]
    ledger = chosen.ledger
    how = "exactly" if plan.is_exact else "about"
    return [
        *lines,
        f"  blocks    {chosen.kv_budget_bytes:,} B / {chosen.block_bytes:,} B = {how} {ledger.num_blocks:,} blocks "
        f"= {chosen.num_tokens:,} tokens",
        *_exactness(plan),
    ]


def _budget_origin(plan: Plan) -> str:
    if plan.config.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    if plan.device == "cuda":
        return "what is left"
    return "a CPU's default of 1 GiB, or half of what is free if that is less"


def _exactness(plan: Plan) -> list[str]:
    if plan.is_exact:
        return []
    if plan.device == "cpu":
        return ["            About: it is half of what is free when the engine starts."]
    if plan.record is not None:
        return ["            About: the last start here served another model, or with other settings."]
    return ["            About: a GPU engine measures its largest step and the driver's part. Here both are reckoned."]


def _what_fits(plan: Plan) -> list[str]:
    chosen, config = plan.chosen, plan.config
    ledger = chosen.ledger
    assert ledger is not None
    limit = ledger.max_model_len
    if config.max_model_len is not None:
        why = "as asked"
    elif limit < plan.spec.max_position:
        why = f"all the cache holds; the model would take {plan.spec.max_position:,}"
    else:
        why = f"the model's limit; the cache holds {chosen.num_tokens / limit:.1f} of them"
    lines = ["What fits", f"  longest sequence   {limit:,} tokens ({why})"]
    lengths = [length for length in _LENGTHS if length < limit] + [limit]
    counts = [f"{ledger.num_blocks // ledger.blocks_for(length):,} of {length:,}" for length in lengths]
    lines.append(f"  full at once       {', '.join(counts)} tokens")
    if plan.needs is None or chosen.fit is None:
        return [
            *lines,
            "  your traffic       give --prompt-len and --output-len, or --mix, to see how many run at once",
        ]
    needs, fit = plan.needs, chosen.fit
    lines.append(f"  your traffic       {_mix_text(plan)}")
    watermark = int(config.watermark * ledger.num_blocks)
    usable = ledger.num_blocks - watermark
    details = [
        f"at a random moment a sequence holds {needs.mean_blocks:.1f} blocks, at its end at most {needs.max_blocks:,}",
        f"about {fit.typical:,} run at once: ({ledger.num_blocks:,} - a watermark of {watermark:,}) / "
        f"{needs.mean_blocks:.1f}",
        f"{fit.always:,} even if all are at their end: {usable:,} / {needs.max_blocks:,}",
        f"{needs.waste_percent:.1f} % of the slots they hold are empty ends of last blocks",
    ]
    return [*lines, *(" " * 21 + line for line in details), *_wish(plan)]


def _mix_text(plan: Plan) -> str:
    total = sum(kind.share for kind in plan.mix)
    parts = []
    for kind in plan.mix:
        share = f"{100 * kind.share / total:.0f} % " if len(plan.mix) > 1 else ""
        parts.append(f"{share}{kind.prompt_len:,} in, {kind.output_len:,} out")
    return "; ".join(parts)


def _wish(plan: Plan) -> list[str]:
    if plan.concurrency is None or plan.wanted_kv_bytes is None or plan.wanted_memory_bytes is None:
        return []
    assert plan.chosen.fit is not None
    is_met = plan.chosen.fit.typical >= plan.concurrency
    device = "GPU" if plan.device == "cuda" else "machine"
    return [
        f"  {plan.concurrency:,} at once".ljust(21)
        + f"{'fits' if is_met else 'does not fit'}: it takes {size(plan.wanted_kv_bytes)} of KV cache, a {device} with "
        f"{size(plan.wanted_memory_bytes)}"
    ]


def _choices(plan: Plan) -> list[str]:
    has_mix = plan.needs is not None
    heads = ["KV dtype", "TP", "weights", "KV/token", "blocks", "tokens", "longest"]
    heads += ["at once", "always"] if has_mix else ["full length"]
    rows = [_choice_row(plan, choice, has_mix) for choice in plan.choices]
    lines = ["Choices, per device" if plan.device == "cuda" else "Choices"]
    lines += [f"  {line}" for line in aligned([heads, *rows])]
    if plan.skipped:
        lines.append(f"  {'; '.join(plan.skipped)}.")
    if plan.device == "cuda":
        lines.append("  TP is arithmetic for a model split over so many GPUs (-tp): several have not been measured.")
    return lines


def _choice_row(plan: Plan, choice: DevicePlan, has_mix: bool) -> list[str]:
    row = [choice.kv_dtype, str(choice.tensor_parallel), size(choice.weight_bytes), size(choice.token_bytes)]
    if choice.ledger is None:
        return [*row, "does not fit", *[""] * (4 if has_mix else 3)]
    ledger = choice.ledger
    row += [f"{ledger.num_blocks:,}", f"{choice.num_tokens:,}", f"{ledger.max_model_len:,}"]
    if has_mix:
        assert choice.fit is not None
        return [*row, f"{choice.fit.typical:,}", f"{choice.fit.always:,}"]
    return [*row, f"{ledger.num_blocks // ledger.blocks_for(ledger.max_model_len):,}"]


def _flags(plan: Plan, hub_id: str) -> list[str]:
    words = [f"--model {hub_id}"]
    for name in _told(plan):
        flag = "--" + name.replace("_", "-")
        if all(flag != other.name for other in plan.flags):
            value = getattr(plan.config, name)
            words.append(flag if value is True else f"{flag} {value}")
    words += [f"{flag.name} {flag.value}" for flag in plan.flags]
    advised = plan.advised
    if advised is None or advised.ledger is None:
        degrees = [choice.tensor_parallel for choice in plan.choices if choice.ledger is not None]
        split = f"; split, it fits on {min(degrees)} such GPUs" if degrees and min(degrees) > 1 else ""
        return ["Flags", f"  what does not fit says above what to change{split}"]
    lines = ["Flags", f"  quire serve {' '.join(words)}"]
    if not plan.flags:
        return [*lines, "  nothing to add: the defaults fit"]
    width = max(len(flag.name) for flag in plan.flags)
    lines += [f"    {flag.name:<{width}}  {flag.reason}" for flag in plan.flags]
    # The record of the last start on a GPU holds for its own settings: with others the engine measures anew.
    is_fixed = plan.config.kv_cache_memory_bytes is not None or "--kv-cache-memory-bytes" in {
        f.name for f in plan.flags
    }
    about = "" if is_fixed or (plan.is_exact and plan.device == "cpu") else "about "
    after = f"{about}{advised.ledger.num_blocks:,} blocks of {advised.ledger.block_size}, {advised.num_tokens:,} tokens"
    if advised.fit is not None:
        after += f", about {advised.fit.typical:,} of your requests at once"
        if plan.concurrency is not None and advised.fit.typical < plan.concurrency:
            after += f" ({plan.concurrency:,} were asked for)"
    return [*lines, f"  with these: {after}"]


def _told(plan: Plan) -> list[str]:
    """Settings that the user wrote on this command line: they belong on the engine's too."""
    defaults = type(plan.config)()
    names = plan.config.given - {"model"}
    return sorted(name for name in names if getattr(plan.config, name) != getattr(defaults, name))
