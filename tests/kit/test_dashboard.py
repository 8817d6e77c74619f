"""The dashboard: what Grafana needs to load it, and queries that Prometheus understands and that find something."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.checkers import check
from kit.contrib import ALERTS, DASHBOARD, FILES
from kit.exported import exported, labels_in, names_in

UNITS = {"short", "reqps", "ops", "s", "percentunit"}
COLUMNS = 24


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    shape: dict[str, Any] = json.loads(FILES[DASHBOARD])
    return shape


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


def test_every_panel_has_a_number_a_place_and_the_chosen_source(board: dict[str, Any]) -> None:
    numbers = [panel["id"] for panel in board["panels"]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "id" not in board, "Grafana gives it"
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < COLUMNS
        taken |= cells
    for panel in panels(board):
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["description"].endswith(".")


def test_dashboard_rows_show_every_exported_metric(board: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Current state", "Requests", "Latency", "Store", "Pending work", "Workers", "Tenants"]
    asked = " ".join(queries(board))
    for name in exported():
        if not name.endswith(("_sum", "_bucket", "_count")) or name.endswith("_bucket"):
            assert re.search(rf"\b{name}\b", asked), f"no panel shows {name}"


def test_every_metric_and_label_is_one_that_is_exported(board: dict[str, Any]) -> None:
    # R192, R199, R200, R211, R214, R255
    known = exported()
    asked = [*queries(board), *(one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query")]
    for query in asked:
        assert names_in(query) <= set(known), query
        assert names_in(query), query
        for name, label in labels_in(query):
            assert label in known[name] | {"job"}, f"{name} has no label {label}"
    for query in queries(board):
        for kept, name in re.findall(r"by \(([\w, ]+)\) \((?:rate|increase)?\(?(api_idempotency_\w+)", query):
            assert set(kept.split(", ")) <= known[name], query


def test_every_legend_names_labels_that_its_query_keeps(board: dict[str, Any]) -> None:
    for panel in panels(board):
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {label for found in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for label in found.split(", ")}
            assert shown == kept - {"le"}, panel["title"]


def test_variables_are_used_and_defined(board: dict[str, Any]) -> None:
    defined = {variable["name"] for variable in board["templating"]["list"]}
    text = json.dumps(board)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == defined == {"datasource", "job", "operation"}


def test_prometheus_understands_every_query(board: dict[str, Any], tmp_path: Path) -> None:
    rules = [
        {"record": f"query{number}", "expr": _typed(query)}
        for number, query in enumerate([*queries(board), *(one["expr"] for one in board["annotations"]["list"])])
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in check(path)


def _typed(query: str) -> str:
    """The query with what Grafana puts into it."""
    return query.replace("$__rate_interval", "1m").replace("$job", "shop").replace("$operation", "pay")


def test_dashboard_thresholds_match_the_alerts(board: dict[str, Any]) -> None:
    red = {
        panel["title"]: steps[-1]["value"]
        for panel in panels(board)
        if len(steps := panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) > 1
    }
    alerts = {
        "Refused: store failure": "OncekeyReservationsFail",
        "Oldest unknown outcome": "OncekeyUnknownOld",
        "Dead letters": "OncekeyDeadLetters",
        "Outbox lag": "OncekeyOutboxLag",
    }
    rules = [rule for group in yaml.safe_load(FILES[ALERTS])["groups"] for rule in group["rules"]]
    limits = {rule["alert"]: re.findall(r"> ([\d.]+)$", rule["expr"]) for rule in rules}
    assert {title: [f"{limit:g}"] for title, limit in red.items()} == {
        title: limits[alert] for title, alert in alerts.items()
    }
