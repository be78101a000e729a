"""The two simulated experiments as the lab runs them: with a line that says what came out."""

from __future__ import annotations

from typing import Any

from quire.bench.units import times
from quire.lab import batching, fragmentation
from quire.lab.context import LabContext
from quire.lab.result import Result


def run_fragmentation(context: LabContext) -> Result:
    result = fragmentation.run(context)
    tell_fragmentation(result, context)
    return result


def tell_fragmentation(result: Result, context: LabContext) -> None:
    fragmentation.tell(result)
    by_key: dict[str, Any] = {each["key"]: each for each in result.data["runs"]}
    blocks, largest = by_key["paged"], by_key["max"]
    result.data["headline"] = (
        f"tokens fill {blocks['usage']['tokens']:.0f} % of memory with blocks, {largest['usage']['tokens']:.0f} % when "
        f"each request reserves the maximum; {times(blocks['width'] / largest['width'])} as many run at once"
    )


def run_batching(context: LabContext) -> Result:
    result = batching.run(context)
    tell_batching(result, context)
    return result


def tell_batching(result: Result, context: LabContext) -> None:
    batching.tell(result)
    static, continuous = result.data["all_at_once"]
    result.data["headline"] = (
        f"{100 * static['utilisation']:.0f} % of the slots do useful work in static batches, "
        f"{100 * continuous['utilisation']:.0f} % in continuous ones: "
        f"{times(continuous['output_tok_s'] / static['output_tok_s'])} the throughput"
    )
