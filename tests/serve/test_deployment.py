"""Check docs/guides/serving.md, the files of docs/serving, and the metrics that they name."""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import yaml
from prometheus_client import parser

from tests.conftest import ROOT
from tests.test_docs import table
from tfexport.cli import main
from tfexport.generation import DecodeConfig
from tfexport.serve.app import build_app
from tfexport.serve.config import ServingConfig
from tfexport.serve.engine import Engine
from tfexport.serve.metrics import BUCKETS, Metrics
from tfexport.serve.observer import Outcome

GUIDE, FILES = ROOT / "docs" / "guides" / "serving.md", ROOT / "docs" / "serving"
ALERTS = yaml.safe_load((FILES / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
DASHBOARD = json.loads((FILES / "grafana.json").read_text(encoding="utf-8"))
POD, SERVICE, BUDGET = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text(encoding="utf-8"))
EXEC_FORMS = {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
# Beyond the drain itself: an engine that gives up, answers that are sent, interpreters that end.
MARGIN_S = 3
PROBES = ("/livez", "/readyz")


def tool(name: str, *arguments: object, directory: Path, stdin: str = "") -> str:
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    command = [name, *map(str, arguments)]
    done = subprocess.run(command, cwd=directory, input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def served(arguments: list[str]) -> dict[str, Any]:
    _, command, _ = main.resolve_command(click.Context(main), ["serve"])
    assert command is not None
    return command.make_context("serve", list(arguments)).params


def exposed() -> set[str]:
    metrics = Metrics()
    metrics.observer("m")
    metrics.engines = {"m": Engine("m")}
    text = metrics.measured().expose("")[0].decode()
    names = set(re.findall(r"^(\w+)[{ ]", text, re.MULTILINE))
    return names | set(re.findall(r"^# TYPE (\w+) gauge$", text, re.MULTILINE))


EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=rule.get("alert") or rule["record"]) for rule in ALERTS),
    *(
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ),
    pytest.param(DASHBOARD["templating"]["list"][1]["query"]["query"], id="models"),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_use_existing_metrics_and_outcomes(expression: str) -> None:
    recorded = {rule["record"] for rule in ALERTS if "record" in rule}
    for name in re.findall(r"[\w:]*tfexport_[\w:]+", expression):
        assert name in (recorded if ":" in name else exposed())
    for listed in re.findall(r'outcome(?:=|!=|=~|!~)"([^"]+)"', expression):
        assert set(listed.split("|")) <= set(get_args(Outcome))


def test_every_server_error_counts() -> None:
    (ratio,) = (rule["expr"] for rule in ALERTS if rule.get("record") == "model_outcome:tfexport_requests:ratio")
    blamed, of_clients = (set(found.split("|")) for found in re.findall(r'~"([^"]+)"', ratio))
    assert blamed | of_clients | {"ok"} == set(get_args(Outcome))


def test_every_alert_is_tested_and_names_the_remedy() -> None:
    tests = yaml.safe_load((FILES / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    alerts = {rule["alert"]: rule for rule in ALERTS if "alert" in rule}
    for name, rule in alerts.items():
        assert set(rule["annotations"]) == {"summary", "remedy"}
        found = [case for test in tests for case in test["alert_rule_test"] if case["alertname"] == name]
        assert {bool(case.get("exp_alerts")) for case in found} >= {True}, name
    options = set(re.findall(r"--[\w-]+", json.dumps(ALERTS)))
    assert options <= {spelled for p in main.get_command(None, "serve").params for spelled in p.opts}  # type: ignore[arg-type,union-attr]


def test_prometheus_takes_the_rules() -> None:
    assert "SUCCESS" in tool("promtool", "check", "rules", "alerts.yml", directory=FILES)
    assert "SUCCESS" in tool("promtool", "test", "rules", "alerts_test.yml", directory=FILES)


def unit() -> dict[str, Any]:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((FILES / "tfexport.service").read_text(encoding="utf-8").replace("\\\n", ""))
    return dict(parser["Service"])


def test_the_unit_starts_the_server_and_waits_for_it() -> None:
    service = unit()
    program, command, *arguments = shlex.split(service["ExecStart"])
    given = served(arguments)
    assert (Path(program).name, command, given["host"]) == ("tfexport", "serve", "127.0.0.1")
    assert service["KillSignal"] == "SIGTERM"
    assert "-HUP" in service["ExecReload"]
    assert float(service["TimeoutStopSec"]) >= given["drain_delay_s"] + given["shutdown_timeout_s"] + MARGIN_S


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (FILES / "tfexport.service").read_text(encoding="utf-8")
    program = shlex.split(unit()["ExecStart"])[0]
    (tmp_path / "tfexport.service").write_text(text.replace(program, "/bin/true"), encoding="utf-8")
    assert tool("systemd-analyze", "verify", tmp_path / "tfexport.service", directory=tmp_path) == ""


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Containerfile with what they are given, lines that go on joined."""
    lines = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines.splitlines() if line)]


@pytest.mark.parametrize(
    ("name", "extra", "device"), [("Containerfile", "cpu", "cpu"), ("Containerfile.gpu", "gpu", "cuda")]
)
def test_an_image_starts_the_server_on_all_addresses(name: str, extra: str, device: str) -> None:
    found = instructions(FILES / name)
    assert {kind for kind, _ in found} <= {
        *"ARG FROM WORKDIR COPY RUN ENV USER EXPOSE STOPSIGNAL".split(),
        *EXEC_FORMS,
    }
    last = dict(found)  # of each instruction the last
    program, command, *arguments = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    given = served(arguments)
    assert (program, command, given["host"], given["device"]) == ("tfexport", "serve", "0.0.0.0", device)
    assert last["EXPOSE"] == str(given["port"])
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert last["USER"] == "65534:65534"
    (wait,) = re.findall(r"--time (\d+)", (FILES / name).read_text(encoding="utf-8"))
    assert int(wait) >= given["shutdown_timeout_s"] + MARGIN_S
    check = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
    (url,) = re.findall(r"http://[^']+", check[-1])
    assert url.removeprefix(f"http://127.0.0.1:{given['port']}") in PROBES
    (extras,) = re.findall(r'"\.\[(.+)\]"', last["RUN"])
    assert extras.split(",") == [extra, "serve", "sign"]  # no PyTorch; sign, so that --trusted-keys works
    for kind, rest in found:
        if kind == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / source).exists() for source in rest.split()[:-1])


def test_the_pod_is_probed_where_the_server_answers_and_has_time_to_drain() -> None:
    labels = POD["spec"]["template"]["metadata"]["labels"]
    assert all(
        one["spec"]["selector"].get("matchLabels", one["spec"]["selector"]) == labels for one in (POD, SERVICE, BUDGET)
    )
    pod = POD["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = served(container["args"])
    assert given["host"] == "0.0.0.0"
    (port,) = container["ports"]
    assert port["containerPort"] == given["port"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in PROBES
        assert probe["port"] == port["name"]
    assert pod["terminationGracePeriodSeconds"] >= given["drain_delay_s"] + given["shutdown_timeout_s"] + MARGIN_S
    assert given["drain_delay_s"] > container["readinessProbe"]["periodSeconds"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(given["token_file"].parent) in mounted
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("found", [POD, SERVICE, BUDGET], ids=lambda found: found["kind"])
def test_kubernetes_takes_the_objects(found: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kubernetes_validate.validate(found, "1.30", strict=True)


def test_the_openapi_document_describes_every_option_with_its_bounds() -> None:
    schemas = build_app({}).openapi()["components"]["schemas"]
    options = schemas["Parameters"]["properties"]
    assert options.keys() == {*DecodeConfig().to_dict(), "prefix", "priority", "timeout_ms", "timeout"}
    assert options["num_beams"].items() >= {"type": "integer", "minimum": 1, "maximum": 64}.items()
    assert options["num_beams"]["description"] == "Beams of beam search; 1 is greedy."
    assert options["suppress_tokens"]["items"] == {"type": "integer", "minimum": 0}
    assert {"GenerateRequest", "InferRequest", "AlignRequest", "Generated", "Inferred"} <= schemas.keys()
    paths = build_app({}).openapi()["paths"]
    for path, types in (("/v2/models/{name}/generate", 2), ("/v1/audio/transcriptions", 1)):
        contents = paths[path]["post"]["requestBody"]["content"]
        assert len(contents) == types
        form = contents["multipart/form-data"]["schema"]
        form = schemas[form["$ref"].rpartition("/")[2]] if "$ref" in form else form
        assert {"format", "contentMediaType"} & form["properties"]["file"].keys()
        assert form["required"] == ["file"]


def test_the_outcomes_are_those_of_the_code() -> None:
    assert {row[0].strip("`") for row in table(GUIDE, "outcome")} == set(get_args(Outcome))


KINDS = {
    "counter": "requests source_tokens target_tokens",
    "gauge": "requests_running requests_waiting slots slots_used replicas replicas_ready",
    "histogram": "queue_seconds encode_seconds decode_step_seconds time_to_first_token_seconds "
    "time_per_output_token_seconds request_seconds align_seconds step_batch_size",
}
NAMES = {f"tfexport_{name}": kind for kind, names in KINDS.items() for name in names.split()}


@pytest.fixture(scope="module")
def metrics(dates_bundle: Path) -> Metrics:
    metrics = Metrics()

    async def use() -> None:
        engine = Engine(dates_bundle, ServingConfig(slots=8), observer=metrics.observer("dates"), threads=1)
        metrics.engines = {"dates": engine, "other": Engine(dates_bundle)}
        async with engine:
            await engine.generate("3 May 1999")
            await engine.generate("3 May 1999", do_sample=True, num_return_sequences=2)
            await engine.generate("3 May 1999", max_new_tokens=1)

    asyncio.run(use())
    return metrics


def test_the_names_types_and_labels_are_those_of_the_documentation(metrics: Metrics) -> None:
    body, kind = metrics.measured().expose("text/plain")
    assert kind.startswith("text/plain")
    found = parser.text_string_to_metric_families(body.decode())
    families = {family.name: family for family in found if not family.name.endswith("_created")}
    assert {name: family.type for name, family in families.items()} == NAMES
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert labels == {"model", "outcome", "finish_reason", "le"}
    assert {sample.labels["model"] for family in families.values() for sample in family.samples} == {"dates"}
    limits = {sample.labels["le"] for sample in families["tfexport_queue_seconds"].samples if "le" in sample.labels}
    assert {float(limit) for limit in limits} == {*BUCKETS, float("inf")}


def test_everything_is_counted(metrics: Metrics) -> None:
    def total(name: str) -> float:
        return metrics.measured().total(f"tfexport_{name}", "dates")

    assert total("requests_total") == total("request_seconds_count") == 3
    assert total("queue_seconds_count") == total("time_to_first_token_seconds_count") == 3
    assert total("time_per_output_token_seconds_count") == 2  # one text has one token
    assert total("encode_seconds_count") == 3
    assert total("decode_step_seconds_count") == total("step_batch_size_count") >= 23
    assert total("step_batch_size_sum") == total("target_tokens_total") >= 34
    assert total("source_tokens_total") > 6
    assert total("slots") == 8
    assert total("slots_used") == total("requests_running") == total("requests_waiting") == 0


def test_promtool_finds_no_problem(metrics: Metrics) -> None:
    assert tool("promtool", "check", "metrics", directory=FILES, stdin=metrics.measured().expose("")[0].decode()) == ""
