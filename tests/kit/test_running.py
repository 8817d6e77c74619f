"""Units and manifests: the programs that read them find nothing wrong, and the command takes every word of them."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
import yaml
from kubernetes_validate import ValidationError, latest_version, validate

from cli.operating import oncekey
from harness.checkers import VARIABLES, CheckerMissingError, program, verify
from harness.pages import ROOT
from kit.contrib import ALERTS, DASHBOARD, FILES, MANIFESTS, OPERATOR_RULES, UNITS, edited
from oncekey.cli.app import make_app
from oncekey.wire import connect
from oncekey.workers.service import GRACE

OF_THE_OPERATOR = {"PodMonitor", "PrometheusRule"}
"""Kinds of the Prometheus Operator, whose schemas Kubernetes does not bring."""


def test_every_file_is_tested() -> None:
    tested = {ALERTS, DASHBOARD, *UNITS, *MANIFESTS, OPERATOR_RULES}
    assert set(FILES) == {*tested, "README.md"}
    assert {name.split("/")[-1] for name in tested} == set(re.findall(r"`([\w-]+\.\w+)`", FILES["README.md"]))


# Every word is one that the command takes


def accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command line as the command itself does, without doing it."""
    monkeypatch.setenv("ONCEKEY_STORE", "sqlite:///shop.db")
    command: Any = typer.main.get_command(make_app())
    context, rest = None, words[1:]
    while hasattr(command, "resolve_command"):
        context = command.make_context(words[0], rest, parent=context, allow_extra_args=True)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)


def _units() -> list[list[str]]:
    return [shlex.split(line) for name in UNITS for line in re.findall(r"^ExecStart=(.*)$", FILES[name], re.MULTILINE)]


def _containers() -> list[dict[str, Any]]:
    shapes = [shape for name in MANIFESTS for shape in yaml.safe_load_all(FILES[name])]
    specs = [shape["spec"].get("jobTemplate", shape)["spec"] for shape in shapes]
    return [one for spec in specs if "template" in spec for one in spec["template"]["spec"]["containers"]]


def _told() -> list[list[str]]:
    """The commands that alerts tell operators to type."""
    text = yaml.safe_load(FILES[ALERTS])
    described = [rule["annotations"]["description"] for group in text["groups"] for rule in group["rules"]]
    return [shlex.split(one) for said in described for one in re.findall(r"`(oncekey [^`]+ --[^`]+)`", said)]


def test_cli_accepts_every_command_line_of_units_manifests_and_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    units, told = _units(), _told()
    containers = [[*one["command"], *one["args"]] for one in _containers()]
    assert [line[1:3] for line in units] == [
        ["worker", "--app"],
        ["migrate", "up"],
        ["sweep", "--once"],
        ["reap", "--once"],
        ["reconcile", "ledger"],
    ]
    assert [line[:2] for line in containers] == [
        ["oncekey", "worker"],
        ["oncekey", "migrate"],
        ["oncekey", "reconcile"],
    ]
    assert len(told) > 8
    for line in [*units, *containers, *told]:
        accepted(line, monkeypatch)


@pytest.mark.parametrize(
    "line", ["oncekey worker --app a:b --bogus", "oncekey worker", "oncekey wrk", "oncekey migrate up --phase never"]
)
def test_command_line_check_rejects_invalid_commands(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"bogus|Missing|No such command|never"):
        accepted(shlex.split(line), monkeypatch)


def test_a_supervisor_waits_longer_than_the_grace() -> None:
    service = dict(_unit(FILES[UNITS[0]])["Service"])
    (worker, *_) = yaml.safe_load_all(FILES[MANIFESTS[0]])
    pod = worker["spec"]["template"]["spec"]
    for words, seconds in (
        (shlex.split(service["ExecStart"]), int(service["TimeoutStopSec"])),
        (pod["containers"][0]["args"], pod["terminationGracePeriodSeconds"]),
    ):
        assert int(words[words.index("--grace") + 1]) == GRACE
        assert seconds == GRACE + 15


# systemd


def test_systemd_analyze_accepts_the_units(tmp_path: Path) -> None:
    # It looks for what units name: this environment's own command, and a folder and a user of this machine.
    own = Path(sys.executable).with_name("oncekey")
    changes = [
        ("/opt/shop/.venv/bin/oncekey", str(own)),
        ("=/opt/shop", f"={tmp_path}"),
        ("/etc/oncekey/environment", str(tmp_path / "environment")),
        ("User=shop", "User=root"),
    ]
    paths = [tmp_path / Path(name).name for name in UNITS]
    for path, name in zip(paths, UNITS, strict=True):
        path.write_text(edited(name, *(changes if name.endswith(".service") else ())))
    assert verify(paths) == ""
    with paths[0].open("a") as unit:
        unit.write("[Service]\nRestrat=always\n")
    assert "Restrat" in verify(paths)


def test_missing_checker_fails_with_the_make_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in VARIABLES.items():
        monkeypatch.setenv(variable, "no-such-program")
        with pytest.raises(CheckerMissingError, match=f"No {name} was found: `make "):
            program(name)


def _unit(text: str) -> dict[str, list[tuple[str, str]]]:
    """Sections of a unit, with their lines in order."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = here = []
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            here.append((name, value))
    return sections


def test_systemd_units_contain_no_secrets_and_are_sandboxed() -> None:
    for name in (one for one in UNITS if one.endswith(".service")):
        service = dict(_unit(FILES[name])["Service"])
        assert service["EnvironmentFile"] == "/etc/oncekey/environment"
        assert {service[one] for one in ("NoNewPrivileges", "PrivateTmp", "ProtectHome")} == {"yes"}
        assert service["ProtectSystem"] == "strict"
        assert service["User"] == "shop"
    worker = _unit(FILES[UNITS[0]])
    assert dict(worker["Service"])["Restart"] == "always"
    assert ("Wants", "network-online.target oncekey-migrate.service") in worker["Unit"]
    assert "Requires" not in dict(worker["Unit"]), "a migration that fails would leave the worker dead"


# Kubernetes


def _shapes() -> list[dict[str, Any]]:
    return [shape for name in (*MANIFESTS, OPERATOR_RULES) for shape in yaml.safe_load_all(FILES[name])]


def test_kubernetes_manifests_match_their_schemas() -> None:
    shapes = _shapes()
    assert [shape["kind"] for shape in shapes] == [
        "Deployment", "PodDisruptionBudget", "Job", "PodMonitor", "CronJob", "PrometheusRule",
    ]  # fmt: skip
    for shape in shapes:
        if shape["kind"] in OF_THE_OPERATOR:
            assert shape["apiVersion"] == "monitoring.coreos.com/v1"
        else:
            validate(shape, latest_version(), strict=True)
    with pytest.raises(ValidationError):
        validate({**shapes[0], "specs": {}}, latest_version(), strict=True)


def test_kubernetes_selectors_and_ports_match_the_pods() -> None:
    deployment, budget, _, monitor, *_ = _shapes()
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    for selector in (deployment["spec"]["selector"], budget["spec"]["selector"], monitor["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels
    (worker,) = deployment["spec"]["template"]["spec"]["containers"]
    assert worker["ports"] == [{"name": "health", "containerPort": 9000}]
    assert "0.0.0.0:9000" in worker["args"]
    probes = {name: worker[name]["httpGet"] for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
        "startupProbe": "/healthz",
    }
    assert {probe["port"] for probe in probes.values()} == {"health"}
    (scraped,) = monitor["spec"]["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"]) == ("health", "/metrics")


def test_containers_read_the_store_url_from_a_secret_without_root() -> None:
    for container in _containers():
        (url,) = (one for one in container["env"] if one["name"] == "ONCEKEY_STORE")
        assert url == {"name": "ONCEKEY_STORE", "valueFrom": {"secretKeyRef": {"name": "oncekey", "key": "store-url"}}}
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert not own["allowPrivilegeEscalation"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
    for shape in _shapes():
        spec = shape["spec"].get("jobTemplate", shape)["spec"]
        if "template" not in spec:
            continue
        pod = spec["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]


# The nightly comparison of ledgers


class _Charges(BaseHTTPRequestHandler):
    """The provider's export."""

    charges: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        body = json.dumps(self.charges).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("scheduled", ["systemd", "kubernetes"])
def test_scheduled_ledger_reconciliation_command_runs(
    scheduled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # R271: the words of the unit and of the CronJob, against a store and a ledger that agree, and one that does not
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONCEKEY_STORE", "sqlite:///shop.db")
    module = f"shop_by_{scheduled}"
    made_up = 'from oncekey import Once\n\nonce = Once("sqlite:///shop.db", migrate=True)\n'
    (tmp_path / f"{module}.py").write_text(made_up)
    connect("sqlite:///shop.db").migrate()
    served = ThreadingHTTPServer(("127.0.0.1", 0), type("Charges", (_Charges,), {"charges": []}))
    thread = threading.Thread(target=served.serve_forever, args=(0.05,))
    thread.start()
    try:
        if scheduled == "systemd":
            (words,) = [one[1:] for one in _units() if "ledger" in one]
        else:
            (words,) = [one["args"] for one in _containers() if one["name"] == "ledger"]
        own = {
            "https://ledger.example.com/charges.json": f"http://127.0.0.1:{served.server_port}/charges",
            "shop.main:once": f"{module}:once",
        }
        assert set(own) <= set(words)
        words = [own.get(word, word) for word in words]
        agreed = oncekey(*words)
        served.RequestHandlerClass.charges.append({"provider_id": "ch_1", "amount": "5.00"})  # type: ignore[attr-defined]
        differing = oncekey(*words)
    finally:
        served.shutdown()
        thread.join()
        served.server_close()
    assert (agreed.exit_code, json.loads(agreed.stdout)["agree"]) == (0, True)
    told = json.loads(differing.stdout)
    assert (differing.exit_code, [one["kind"] for one in told["differences"]]) == (1, ["orphan_charge"])


def test_production_checklist_includes_the_scheduled_reconciliation() -> None:
    # R271
    checklist = (ROOT / "docs" / "howto" / "production-checklist.md").read_text("utf-8")
    assert "oncekey-ledger.timer" in checklist
    assert "CronJob" in checklist
