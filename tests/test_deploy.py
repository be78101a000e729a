"""What is shipped for operators, held against the code: names of metrics, flags, endpoints."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_template import render
from observing_fakes import ToldEngine
from prometheus_client.parser import text_string_to_metric_families

from quire.server.metric_names import NAMES
from quire.weights.aliases import ALIASES

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FROM_PROMETHEUS = {"up", "process_start_time_seconds", "process_resident_memory_bytes"}
# vLLM's names that the documents name to say so.
NOT_THERE = ("vllm:lora_requests_info", "vllm:engine_sleep_state")
FUNCTIONS = {
    *("sum", "max", "rate", "increase", "changes", "histogram_quantile", "time"),
    *("by", "on", "and", "or"),
}
COMMON_LABELS = {"model_name", "engine", "instance", "job"}
# A metric's name, then its selector if it has one.
SELECTOR = re.compile(r"\b((?:vllm|quire):\w+|up|process_\w+)\s*(?:\{([^}]*)\})?")


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana/quire.json").read_text())


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/quire-alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    """(where, PromQL) of everything that is shipped."""
    found = [
        (f"panel {panel['title']}", target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]
    found += [(f"alert {rule['alert']}", rule["expr"]) for rule in alerts()]
    return found


def balanced(text: str) -> bool:
    pairs = {")": "(", "]": "[", "}": "{"}
    stack: list[str] = []
    for letter in re.sub(r'"[^"]*"', "", text):
        if letter in pairs.values():
            stack.append(letter)
        elif letter in pairs and (not stack or stack.pop() != pairs[letter]):
            return False
    return not stack and text.count('"') % 2 == 0


@pytest.fixture(scope="module")
def exported(tiny_model: Path) -> set[str]:
    """Names of families that a server shows with a real engine behind it."""
    import asyncio

    from quire import LLM, SamplingParams
    from quire.server.metrics import ServerMetrics

    llm = LLM(str(tiny_model), load_format="dummy", kv_cache_memory_bytes=1 << 20, device="cpu", num_threads=1)
    llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)
    told = ToldEngine()
    told.reading = llm.get_metrics()
    llm.llm_engine.close()
    metrics = ServerMetrics(told, "tiny")
    metrics.on_request_start("/v1/completions")
    metrics.on_refused("brownout")
    page = asyncio.run(metrics.scrape()).decode()
    names = set()
    for family in text_string_to_metric_families(page):
        names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def test_every_name_in_the_table_is_exported_and_no_other(exported: set[str]) -> None:
    ours = {name for name in exported if name.startswith(("vllm:", "quire:"))}
    always = {name for name, known in NAMES.items() if not known.only_with}
    assert ours == always
    source = (ROOT / "quire/engine/metrics.py").read_text()
    for name in set(NAMES) - always:
        assert f'"{name}"' in source, f"{name}: no engine reports it"


@pytest.mark.parametrize(("where", "expr"), expressions())
def test_queries_use_what_the_server_exports(where: str, expr: str) -> None:
    assert balanced(expr), f"{where}: {expr}"
    used = SELECTOR.findall(expr)
    assert used, f"{where} asks for nothing of ours"
    for name, selector in used:
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", selector))
        if name in FROM_PROMETHEUS:
            assert labels <= {"job", "instance"}, f"{where}: {name} has no {labels}"
            continue
        base = name
        if name not in NAMES:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert base in NAMES and NAMES[base].kind == "histogram", f"{where}: nobody exports {name}"
        elif NAMES[name].kind == "histogram":
            raise AssertionError(f"{where}: {name} is a histogram and has no value of its own")
        assert labels <= COMMON_LABELS | set(NAMES[base].labels), f"{where}: {name} has no {labels}"
        if NAMES[base].kind == "counter":
            assert re.search(rf"(rate|increase|changes)\({re.escape(name)}\b", expr) or "captures" in name, (
                f"{where}: {name} is a counter: take its rate"
            )
    words = re.findall(r"(?<![\w:$\"{{])([a-z_]+)\s*\(", re.sub(r'"[^"]*"|\{[^}]*\}', "", expr))
    assert set(words) <= FUNCTIONS, f"{where}: {set(words) - FUNCTIONS}"


def test_legends_use_labels_that_are_there() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), f"{panel['title']}: {label}"


def test_the_dashboard_is_what_its_source_makes() -> None:
    made = runpy.run_path(str(DEPLOY / "grafana/make_dashboard.py"))["dashboard"]()
    assert made == dashboard(), "run: python deploy/grafana/make_dashboard.py"


def test_the_dashboards_panels_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_alerts_say_what_they_mean_and_are_documented() -> None:
    operations = (ROOT / "docs/operations.md").read_text()
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["annotations"].keys() >= {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+[sm]", rule.get("for", "0s"))
        assert f"### {rule['alert']}\n" in operations, (
            f"docs/operations.md does not say what to do about {rule['alert']}"
        )
    assert set(re.findall(r"^### (Quire\w+)$", operations, re.M)) == set(names)


def test_the_scrape_config_finds_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    for file in config["rule_files"]:
        assert (DEPLOY / "prometheus" / file).is_file()
    assert [job["job_name"] for job in config["scrape_configs"]] == ["quire"]


def test_the_example_configuration_is_one() -> None:
    import argparse

    from quire.cli.serve import GROUPS
    from quire.cli.settings_file import gather

    args = argparse.Namespace(config=str(DEPLOY / "quire.yaml"))
    found = gather([flag for flags in GROUPS.values() for flag in flags], args, {})
    assert found.values["drain_timeout"] == 60 and not found.warnings
    # What is commented out would be taken too.
    text = (DEPLOY / "quire.yaml").read_text()
    names = {flag.option[2:] for flags in GROUPS.values() for flag in flags}
    assert set(re.findall(r"^#? ?([a-z-]+): ", text, re.M)) <= names


def test_the_unit_waits_for_the_drain_and_knows_its_flags() -> None:
    unit = (DEPLOY / "systemd/quire.service").read_text()
    drain_s = yaml.safe_load((DEPLOY / "quire.yaml").read_text())["drain-timeout"]
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0]) > drain_s
    start = re.findall(r"^ExecStart=(.*)$", unit, re.M)[0]
    assert set(re.findall(r"--[a-z-]+", start)) <= known_options()


def stages() -> dict[str, list[str]]:
    """The Dockerfile's stages: their instructions, continued lines joined, after those of the stage they start from."""
    text = (DEPLOY / "docker/Dockerfile").read_text()
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines():
        if start := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            stage = found[start[2]] = list(found.get(start[1], ()))
        elif line:
            stage.append(line)
    return found


def test_the_images_are_made_of_files_that_are_there() -> None:
    named = {line.split()[1] for lines in stages().values() for line in lines if re.match(r"COPY (?!--from)", line)}
    let_in = re.findall(r"^!(.*)$", (DEPLOY / "docker/Dockerfile.dockerignore").read_text(), re.M)
    assert named - {"."} <= set(let_in) and all((ROOT / path).exists() for path in let_in)
    # What a build of the package reads.
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "quire"} <= set(let_in)
    for lines in stages().values():
        for source in re.findall(r"--from=(\S+)", "\n".join(lines)):
            assert source in stages()
    assert re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M)  # the build greps for it


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_serves_as_nobody_special_with_variables_that_exist(target: str) -> None:
    from quire.cli.settings_file import _OTHER_VARIABLES, PREFIX

    lines = stages()[target]
    user = [line for line in lines if line.startswith("USER ")]
    assert user == ["USER 10001"] and f"--uid {user[0].split()[1]}" in "\n".join(lines)
    assert lines.index('ENTRYPOINT ["quire", "serve"]') and not any(line.startswith("CMD ") for line in lines)
    variables = set(re.findall(rf"\b({PREFIX}\w+)=", "\n".join(lines)))
    settable = {PREFIX + option[2:].replace("-", "_").upper() for option in known_options() if option.startswith("--")}
    assert variables and variables <= settable | _OTHER_VARIABLES
    pulled = re.findall(r"quire pull (\S+)", "\n".join(lines))
    assert set(pulled) <= set(ALIASES) and (target != "cpu" or pulled)


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_an_image_asks_health_for_its_state(status: int, healthy: bool) -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    (check,) = [line for line in stages()["cpu"] if line.startswith("HEALTHCHECK ")]
    python, *arguments = json.loads(check.partition(" CMD ")[2])
    assert python == "python"
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        variables = os.environ | {"QUIRE_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, check=False)
        thread.join()
    assert asked == ["/health"] and (done.returncode == 0) == healthy


def test_compose_builds_the_images_and_waits_for_the_drain() -> None:
    from quire.server.settings import ServerSettings

    services = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())["services"]
    assert set(services) == {"cpu", "cuda", "server-a", "server-b", "router"}
    for name, service in services.items():
        build = service["build"]
        assert build["target"] == (name if name in ("cpu", "cuda") else "cpu") and build["target"] in stages()
        context = (DEPLOY / "docker" / build["context"]).resolve()
        assert context == ROOT and (context / build["dockerfile"]).samefile(DEPLOY / "docker/Dockerfile")
        assert int(service["stop_grace_period"].removesuffix("s")) > ServerSettings().drain_timeout_s
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert services["cuda"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]

    router = services["router"]
    assert router["entrypoint"] == ["quire", "router"] and set(router["depends_on"]) == {"server-a", "server-b"}
    assert [word for word in router["command"] if "://" in word] == [
        f"http://{one}:8000" for one in router["depends_on"]
    ]
    assert {word for word in router["command"] if word.startswith("--")} <= router_options()


def router_options() -> set[str]:
    return options_of(pytest.importorskip("quire.cli.router", reason="this version has no quire router"), "router")


@pytest.mark.parametrize("unit", ["quire@.service", "quire-router.service"])
def test_units_of_several_servers_agree_with_the_single_one(unit: str) -> None:
    text, single = ((DEPLOY / "systemd" / name).read_text() for name in (unit, "quire.service"))
    for key in ("TimeoutStopSec", "RestartPreventExitStatus", "NoNewPrivileges", "ProtectSystem", "DynamicUser"):
        line = re.compile(rf"^{key}=.*$", re.M)
        assert line.findall(text) == line.findall(single), key
    start = re.findall(r"^ExecStart=(.*)$", text, re.M)[0]
    flags = set(re.findall(r"--[a-z-]+", start))
    assert flags <= (router_options() if "router" in unit else known_options())


CHART = DEPLOY / "helm/quire"
CHANGES: list[dict[str, Any]] = [
    {},
    {
        "replicas": 3,
        "args": ["--max-model-len", "8192"],
        "env": {"QUIRE_LOG_FORMAT": "json"},
        "apiKeySecret": "keys",
        "serviceMonitor": True,
        "persistence.storageClass": "fast",
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
]


def by_kind(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


@pytest.mark.parametrize("changes", CHANGES, ids=["as it is", "with everything"])
def test_the_chart_makes_servers_and_a_router_that_knows_each_of_them(changes: dict[str, Any]) -> None:
    found = by_kind(render(CHART, "chat", changes))
    servers, router = found["StatefulSet", "chat-server"], found["Deployment", "chat-router"]
    assert (
        servers["spec"]["serviceName"] == "chat-server"
        and found["Service", "chat-server"]["spec"]["clusterIP"] == "None"
    )
    count = changes.get("replicas", 2)
    (container,) = router["spec"]["template"]["spec"]["containers"]
    urls = [word for word in container["args"] if "://" in word]
    assert servers["spec"]["replicas"] == count
    assert urls == [f"http://chat-server-{i}.chat-server:8000" for i in range(count)]
    assert container["command"] == ["quire", "router"]
    (server,) = servers["spec"]["template"]["spec"]["containers"]
    assert {word for word in server["args"] if word.startswith("--")} <= known_options()
    assert server["args"][3:] == changes.get("args", []) and server["ports"][0]["containerPort"] == 8000
    for workload in (servers, router):
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == 10001 and pod["terminationGracePeriodSeconds"] == 90
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for one in pod["containers"]:
            assert (
                one["securityContext"]["readOnlyRootFilesystem"]
                and one["readinessProbe"]["httpGet"]["path"] == "/health"
            )
            mounted = {mount["name"] for mount in one.get("volumeMounts", ())}
            claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
            assert mounted == {volume["name"] for volume in pod.get("volumes", ())} | claims
    assert found["Service", "chat"]["spec"]["selector"]["app.kubernetes.io/component"] == "router"
    assert ("ServiceMonitor", "chat-server") in found or "serviceMonitor" not in changes
    variables = {one["name"] for one in server["env"]}
    assert variables >= set(changes.get("env", ())) and ("QUIRE_API_KEY_FILE" in variables) == (
        "apiKeySecret" in changes
    )


@pytest.mark.skipif(
    shutil.which("helm") is None, reason="helm is not installed: the chart is rendered by our own means only"
)
@pytest.mark.parametrize("changes", CHANGES, ids=["as it is", "with everything"])
def test_helm_makes_the_same_of_the_chart(changes: dict[str, Any], tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = values
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = ["helm", "template", "chat", str(CHART), "--kube-version", "1.30.0", "--values", str(file)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = [one for one in yaml.safe_load_all(made) if one]
    assert by_kind(theirs) == by_kind(render(CHART, "chat", changes))
    subprocess.run(["helm", "lint", str(CHART)], capture_output=True, check=True)


def test_the_ray_job_serves_on_its_head_what_the_service_reaches() -> None:
    job, service = yaml.safe_load_all((DEPLOY / "kuberay/quire.yaml").read_text())
    entry = job["spec"]["entrypoint"].split()
    assert entry[:2] == ["quire", "serve"] and {word for word in entry if word.startswith("--")} <= {
        *known_options(), "--distributed-executor-backend", "--pipeline-parallel-size"
    }  # fmt: skip
    cluster = job["spec"]["rayClusterSpec"]
    head, (group,) = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    degree = {name: int(entry[entry.index(f"--{name}-parallel-size") + 1]) for name in ("tensor", "pipeline")}
    assert worker["resources"]["limits"]["nvidia.com/gpu"] * group["replicas"] == degree["tensor"] * degree["pipeline"]
    assert service["spec"]["selector"].items() <= {**head["metadata"]["labels"], "ray.io/node-type": "head"}.items()
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert ports[service["spec"]["ports"][0]["targetPort"]] == int(entry[entry.index("--port") + 1])
    locked = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert not locked or cluster["rayVersion"] == locked[0]


def known_options() -> set[str]:
    from quire.cli import serve

    return options_of(serve, "serve")


def options_of(module: Any, name: str) -> set[str]:
    import argparse

    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    module.add_parser(subparsers)
    return {option for action in subparsers.choices[name]._actions for option in action.option_strings}


@pytest.mark.parametrize("file", ["docs/operations.md", "docs/security.md", "docs/from-vllm.md", "deploy/README.md"])
def test_documents_name_real_flags_metrics_and_anchors(file: str) -> None:
    text = (ROOT / file).read_text()
    other_programs = {
        "--config.file",
        "--now",
        "--backend",
        "--user",
        "--build",
        "--gpus",
        "--rm",
        "--target",
        "--set",
        "--build-arg",
        "--shape",  # of a benchmark
    }
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", re.sub(r"<!--.*?-->", "", text))) - other_programs
    assert flags <= known_options(), flags - known_options()
    images = {"quire:cpu", "quire:cuda", "quire:cuda-ray"}
    for name in set(re.findall(r"\b(?:vllm|quire):[a-z0-9_]+", text)) - images:
        assert name in NAMES or name.startswith(NOT_THERE), f"{file}: nobody exports {name}"
    headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}
    for anchor in re.findall(r"\]\(#([\w-]+)\)", text):
        assert anchor in headings, f"{file} has no heading for #{anchor}"
    for target, anchor in re.findall(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)", text):
        other = (ROOT / file).parent / target
        assert other.is_file(), f"{file} links to {target}"
        if anchor:
            named = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in named}


def test_the_documents_tables_are_what_the_code_says() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_tables.py"))
    for name in made["FILES"]:
        text = (ROOT / "docs" / name).read_text()
        assert made["filled"](text) == text, "run: python -m docs.make_tables"
    paths = {path for _, path in made["paths"]()}
    assert paths <= set(made["PATH_NOTES"]), f"docs/make_tables.py says nothing of {paths - set(made['PATH_NOTES'])}"
    assert paths.isdisjoint(path for paths in made["VLLM_PATHS_MISSING"] for path in paths.split(", "))


def test_every_level_of_the_brownout_has_words() -> None:
    from quire.engine.brownout import MAX_LEVEL
    from quire.server.logs import BROWNOUT_STEPS

    assert len(BROWNOUT_STEPS) == MAX_LEVEL + 1
