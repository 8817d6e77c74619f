"""The Grafana dashboard: rows of panels, each a question with the queries that answer it.

A dashboard's JSON repeats place, number and source for every panel, so this module builds it from a table of what
differs. Every process reports the same gauges of the store, hence `max`; each counts its own requests, hence `sum`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from oncekey.kit.settings import seconds

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_TALL: Final = {"timeseries": 8, "stat": 4}
_PREFIX: Final = "api_idempotency_"
_REFUSED: Final = 'outcome=~"idempotency_store_unavailable|idempotency_record_unreadable"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    description: str
    queries: Mapping[str, str]
    """The queries, by their legends."""
    unit: str = "short"
    wide: int = 8
    kind: str = "timeseries"
    stacked: bool = False
    bad: float | None = None
    """Values above this are red."""


def dashboard(values: Mapping[str, str], *, command: str = "") -> str:
    """The dashboard's JSON. `values` has every setting; `said` has those that were set, to repeat the command."""
    label = values["by"].split(",")[-1]
    shape = {
        "uid": "oncekey",
        "title": "oncekey",
        "description": f"Requests that may be sent again, and happen once. Made by: oncekey kit{command}",
        "tags": ["oncekey", "idempotency"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "annotations": {"list": [_alerts()]},
        "templating": {"list": list(_variables(label))},
        "panels": list(_placed(_rows(label, values))),
    }
    return json.dumps(shape, indent=2) + "\n"


def _rows(label: str, values: Mapping[str, str]) -> Mapping[str, tuple[Panel, ...]]:
    of = f'{label}=~"${label}"'
    ops = f'{of},operation=~"$operation"'
    everything = _rate("requests_total", ops)
    ratio = float(values["reservation-failures"].rstrip("%")) / 100
    waits = f"{_PREFIX}waiting_oldest_seconds{{{of}"
    return {
        "Now": (
            _stat("Requests", "Protected requests per second.", everything, "reqps"),
            _stat(
                "Refused for the store",
                "The share of requests whose key could not be reserved.",
                f"({_rate('requests_total', f'{ops},{_REFUSED}')} / {everything}) or vector(0)",
                "percentunit",
                bad=ratio,
            ),
            _stat(
                "Oldest unknown outcome",
                "How long the outcome has been unknown.",
                f'max ({waits},what="unknown"}})',
                "s",
                bad=seconds(values["unknown-age"]),
            ),
            _stat(
                "Dead letters",
                "Messages that no worker tries any more.",
                f"max ({_PREFIX}dlq_depth{{{of}}})",
                bad=int(values["dead-letters"]),
            ),
            _stat(
                "Outbox lag",
                "How long the oldest parcel is overdue.",
                f"max ({_PREFIX}outbox_lag_seconds{{{of}}})",
                "s",
                bad=seconds(values["outbox-lag"]),
            ),
            _stat("Store answers", "0 where a process does not reach it.", f"min ({_PREFIX}store_up{{{of}}})"),
        ),
        "Requests": (
            Panel(
                "Requests by outcome",
                "new, retried and taken_over were executed; replayed were answered from the store; the others were "
                "refused with this code. bypassed ran without protection.",
                {"{{outcome}}": _rate("requests_total", ops, "outcome")},
                "reqps",
                12,
                stacked=True,
            ),
            Panel(
                "Replays and retries",
                "Stored answers that went out, and keys that had failed and were reserved again.",
                {
                    "replays": _rate("reserve_replay_count_total", of),
                    "new keys": _rate("reserve_created_count_total", of),
                    "retries of failures": _rate("reserve_failed_retry_count_total", of),
                },
                "reqps",
                12,
            ),
            Panel(
                "Conflicts",
                "Requests that met the same one under way, an unknown outcome, or another payload under their key.",
                {
                    "in progress": _rate("reserve_in_progress_count_total", of),
                    "unknown": _rate("reserve_unknown_count_total", of),
                    "misused key": _rate("reserve_key_misuse_count_total", of),
                },
                "reqps",
                12,
            ),
            Panel(
                "Look-ups",
                "Questions to the status resource, by the state that was found or the code that was refused with.",
                {"{{outcome}}": _rate("lookups_total", of, "outcome")},
                "reqps",
                12,
            ),
            Panel(
                "Ends of operations",
                "Where executed operations ended.",
                {"{{state}} {{outcome}}": _rate("settled_total", ops, "state, outcome")},
                "ops",
                12,
                stacked=True,
            ),
        ),
        "Latency": (
            Panel(
                "Operations",
                "From the claim to the settlement. A lease is two or three times the p99.",
                _quantiles("operation", ops),
                "s",
            ),
            Panel("Operations, p99 of each", "The same, by operation.", _quantiles("operation", ops, "operation"), "s"),
            Panel("Claims, p99 of each", "What a key costs a new request.", _quantiles("claim", ops, "operation"), "s"),
            Panel(
                "Time to recover, p95",
                "From the run that failed to its retry, take-over or resolution.",
                _quantiles("recovery", of, "by", 0.95),
                "s",
            ),
            Panel(
                "Short leases",
                "Warnings that a lease is less than twice the p99 of its operation, within the hour.",
                {"{{operation}}": f"sum by (operation) (increase({_PREFIX}short_lease_total{{{ops}}}[1h]))"},
            ),
        ),
        "Store": (
            Panel(
                "Transactions, p99 of each",
                "How long the store takes, by the name of the transaction.",
                _quantiles("store", of, "transaction"),
                "s",
            ),
            Panel(
                "Transactions",
                "How many there are.",
                {"{{transaction}}": _rate("store_duration_seconds_count", of, "transaction")},
                "ops",
                stacked=True,
            ),
            Panel(
                "Failures",
                "Transactions that failed, also those that were said again; and what requests and workers felt of it.",
                {
                    "{{transaction}} {{error}}": _rate("store_failures_total", of, "transaction, error"),
                    "felt": _rate("store_error_count_total", of),
                },
                "ops",
            ),
            Panel(
                "What is in front of it",
                "Questions that were asked before the store's, by what was known. What is refused was not ours.",
                {"{{front}} {{found}}": _rate("fronts_total", of, "front, found")},
                "ops",
            ),
        ),
        "What waits": (
            Panel(
                "Unfinished records",
                "By state. All processes show the same ones.",
                {"{{state}}": f'max by (state) ({_PREFIX}records{{{of},state!="finished"}})'},
                stacked=True,
            ),
            Panel(
                "What waits for an operator",
                "Counted up to 10,000.",
                {"{{what}}": f"max by (what) ({_PREFIX}waiting{{{of}}})"},
            ),
            Panel(
                "How long the oldest waits",
                "Expired records are deleted five minutes after their time at the earliest.",
                {"{{what}}": f"max by (what) ({waits}}})"},
                "s",
            ),
            Panel(
                "Unknown outcomes",
                "How many arose, became known, and were given up, per minute.",
                {
                    "arose": f"60 * {_rate('reconcile_scheduled_count_total', of)}",
                    "became known": f"60 * {_rate('reconcile_resolved_count_total', of)}",
                    "given up, or dead letter": f"60 * {_rate('reconcile_failed_count_total', of)}",
                },
            ),
            Panel("Dead letters", "How many there are.", {"dead letters": f"max ({_PREFIX}dlq_depth{{{of}}})"}),
            Panel(
                "Outbox lag",
                "How long the oldest parcel is overdue.",
                {"lag": f"max ({_PREFIX}outbox_lag_seconds{{{of}}})"},
                "s",
            ),
        ),
        "Workers": (
            Panel(
                "Living workers by task",
                "0 where no worker does it. An application without phases needs no completer.",
                {"{{task}}": f"max by (task) ({_PREFIX}workers{{{of}}})"},
                wide=6,
            ),
            Panel(
                "Heartbeats",
                "How often workers wrote that they live, per minute.",
                {"written": f"60 * {_rate('heartbeats_total', of)}"},
                wide=6,
            ),
            Panel(
                "Messages of providers",
                "Webhooks by how they were answered, per minute; 401 is a wrong signature.",
                {"{{source}} {{status}}": f"60 * {_rate('messages_total', of, 'source, status')}"},
                wide=12,
            ),
            Panel(
                "Keys without their owner",
                "Processes that died with requests in their hands, per minute.",
                {"found": f"60 * {_rate('zombie_key_count_total', of)}"},
                wide=12,
            ),
            Panel(
                "Reaped",
                "Expired records that were deleted.",
                {"deleted": _rate("ttl_pruned_count_total", of)},
                "ops",
                12,
            ),
        ),
        "Tenants": (
            Panel(
                "Misused keys by tenant",
                "Keys that came with another payload, per minute: a client's bug, or an attacker who tries out keys.",
                {"{{tenant}}": f"60 * {_rate('tenant_key_misuse_total', of, 'tenant')}"},
                wide=12,
            ),
            Panel(
                "Repeated requests by tenant",
                "Requests that came again, per minute.",
                {"{{tenant}}": f"60 * {_rate('tenant_duplicates_total', of, 'tenant')}"},
                wide=12,
            ),
        ),
    }


def _stat(title: str, description: str, query: str, unit: str = "short", *, bad: float | None = None) -> Panel:
    return Panel(title, description, {title: query}, unit, 4, "stat", bad=bad)


def _rate(metric: str, matcher: str, by: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({_PREFIX}{metric}{{{matcher}}}[$__rate_interval]))"


def _quantiles(name: str, matcher: str, by: str = "", share: float = 0.99) -> dict[str, str]:
    """Queries for p50, p95 and p99 of a histogram; by a label for one share only, because each gives many lines."""
    within = f"rate({_PREFIX}{name}_duration_seconds_bucket{{{matcher}}}[$__rate_interval])"
    if by:
        return {f"{{{{{by}}}}}": f"histogram_quantile({share}, sum by (le, {by}) ({within}))"}
    return {f"p{each * 100:g}": f"histogram_quantile({each}, sum by (le) ({within}))" for each in (0.5, 0.95, 0.99)}


# The shapes that Grafana wants


def _placed(rows: Mapping[str, tuple[Panel, ...]]) -> Iterator[dict[str, Any]]:
    """Rows and panels, numbered, from left to right and from top to bottom."""
    number = top = 0
    for title, panels in rows.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top},
            "panels": [],
        }
        top, left, tall = top + 1, 0, 0
        for panel in panels:
            if left + panel.wide > _COLUMNS:
                top, left = top + tall, 0
            tall = _TALL[panel.kind]
            number += 1
            yield _shape(panel, number, {"h": tall, "w": panel.wide, "x": left, "y": top})
            left += panel.wide
        top += tall


def _shape(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": _SOURCE,
                "editorMode": "code",
                "expr": query,
                "legendFormat": legend,
                "range": panel.kind != "stat",
                "instant": panel.kind == "stat",
            }
            for position, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _field(panel: Panel) -> dict[str, Any]:
    red = [] if panel.bad is None else [{"color": "red", "value": panel.bad}]
    field: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}, *red]},
    }
    if panel.kind == "stat":
        return field
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    field["custom"] = {"drawStyle": "line", "fillOpacity": 30 if panel.stacked else 5, "stacking": stacking}
    return field


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        shown = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"colorMode": "value", "graphMode": "none", "reduceOptions": shown, "textMode": "value"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _variables(label: str) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}
    yield _labels(label, label.capitalize(), f"label_values({_PREFIX}store_up, {label})")
    yield _labels("operation", "Operation", f'label_values({_PREFIX}requests_total{{{label}=~"${label}"}}, operation)')


def _labels(name: str, title: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _alerts() -> dict[str, Any]:
    """Alerts that fired, as marks in every panel."""
    return {
        "name": "Alerts",
        "datasource": _SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Oncekey.+",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "tagKeys": "severity",
        "step": "60s",
    }
