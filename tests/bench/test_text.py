"""Tables for people: words, not keys."""

from __future__ import annotations

from quire.bench.report import Percentiles, RunReport
from quire.bench.text import details

SERVER = {
    "server_kv_usage_max": 0.00755,
    "server_running_max": 8.0,
    "server_waiting_max": 2.0,
    "server_preemptions": 0.0,
    "server_prefix_hit_rate": 0.25,
}


def report(**values: float) -> RunReport:
    found = RunReport(workload="fixed", engine="server", requests=8, completed=8, seconds=2.0)
    found.values = {"req_s": 4.12, "failed_requests": 0, "refused_requests": 0} | values
    return found


def line(text: str, name: str) -> str | None:
    return next((found.split(maxsplit=1)[1] for found in text.splitlines() if found.split()[:1] == [name]), None)


def test_a_server_in_words() -> None:
    text = details(report(**SERVER))
    assert line(text, "requests") == "4.12/s"
    assert line(text, "server") == (
        "KV cache 0.8 % in use at most, 8 requests running at most, 2 waiting at most, no preemptions, "
        "25 % of prompt tokens from its prefix cache"
    )
    assert line(text, "goodput") is None
    assert "_" not in text  # no raw keys
    assert "1 preemption," in details(report(**SERVER | {"server_preemptions": 1.0}))
    assert line(details(report()), "server") is None  # one that tells nothing of itself


def test_failures_are_told_where_there_are_any() -> None:
    text = details(report(failed_requests=2, refused_requests=3))
    assert line(text, "requests") == "4.12/s, 2 failed, 3 refused by a full server"


def test_goodput_is_what_was_asked_for() -> None:
    run = report(goodput_requests=0, goodput_req_s=0.0)
    run.parameters["goodput"] = "ttft:200 tpot:50"
    assert line(details(run), "goodput") == "0 of 8 requests in time (ttft:200 tpot:50), 0/s"
    run.values |= {"goodput_requests": 6, "goodput_req_s": 3.0}
    assert line(details(run), "goodput") == "6 of 8 requests in time (ttft:200 tpot:50), 3.00/s"


def test_the_latencies_that_vllm_prints() -> None:
    run = report()
    run.ttft_s, run.tpot_s, run.itl_s = (Percentiles(8, 0.2, 0.1 * k, 0.3, 0.4, 0.5) for k in (1, 2, 3))
    rows = [row.split("  ") for row in details(run).splitlines() if "(T" in row or "(I" in row]
    assert [[cell.strip() for cell in row if cell][:2] for row in rows] == [
        ["first token (TTFT)", "100.0"],
        ["time per output token (TPOT)", "200.0"],
        ["inter-token (ITL)", "300.0"],
    ]


def test_padding_of_static_batches() -> None:
    run = RunReport(workload="fixed", engine="hf")
    run.values = {"padding_waste_percent": 31.26, "kv_slots_reserved_peak": 12_345.0}
    assert line(details(run), "padding") == "31.3 % of the reserved slots stay empty; 12,345 reserved at most"
