"""The files in `contrib`, by their paths there."""

from __future__ import annotations

from harness.pages import ROOT

CONTRIB = ROOT / "contrib"
ALERTS = "prometheus/oncekey-alerts.yaml"
DASHBOARD = "grafana/oncekey-dashboard.json"
UNITS = (
    "systemd/oncekey-worker.service",
    "systemd/oncekey-migrate.service",
    "systemd/oncekey-upkeep.service",
    "systemd/oncekey-upkeep.timer",
    "systemd/oncekey-ledger.service",
    "systemd/oncekey-ledger.timer",
)
MANIFESTS = (
    "kubernetes/worker.yaml",
    "kubernetes/migrate.yaml",
    "kubernetes/podmonitor.yaml",
    "kubernetes/ledger.yaml",
)
OPERATOR_RULES = "kubernetes/prometheusrule.yaml"

FILES = {path.relative_to(CONTRIB).as_posix(): path.read_text("utf-8") for path in CONTRIB.rglob("*") if path.is_file()}


def edited(name: str, *changes: tuple[str, str]) -> str:
    """A file as a user changes it by hand: every text that is replaced has to be in it."""
    text = FILES[name]
    for found, wanted in changes:
        assert found in text, f"{name} does not contain {found!r}"
        text = text.replace(found, wanted)
    return text
