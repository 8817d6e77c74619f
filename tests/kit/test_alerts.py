"""The alert rules: each fires when it should and not before, on series like ours and on the pages of a real shop."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from harness.checkers import Case, check, try_out
from kit.contrib import ALERTS, CONTRIB, FILES, OPERATOR_RULES, edited
from kit.exported import exported, labels_in, names_in
from observe.shop import AsgiShop
from oncekey.core.model import SECOND, Code
from oncekey.ops.doctor import Limits
from oncekey.ops.tasks import NAMES
from oncekey.stores.operate import WAITING

RULES = CONTRIB / ALERTS
ALL = [rule for group in yaml.safe_load(FILES[ALERTS])["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_alert_rules() -> None:
    # R211
    assert "SUCCESS: 17 rules found" in check(RULES)


def test_every_metric_and_label_of_a_rule_is_one_that_is_exported() -> None:
    # R129, R211, R213
    known = exported()
    for rule in ALL:
        assert names_in(rule["expr"])
        assert names_in(rule["expr"]) <= set(known), rule["alert"]
        for name, label in labels_in(rule["expr"]):
            assert label in known[name], f"{rule['alert']}: {name} has no label {label}"


def test_alert_rules_use_only_existing_label_values() -> None:
    text = FILES[ALERTS]
    assert set(re.findall(r'what="(\w+)"', text)) <= set(WAITING)
    outcomes = {one for found in re.findall(r'outcome=~?"([\w|]+)"', text) for one in found.split("|")}
    assert outcomes <= {code.value for code in Code} | {"bypassed"}


def test_gauge_alerts_require_a_reachable_store() -> None:
    # A process that does not shows the gauges that it saw last.
    gauges = ("waiting", "waiting_oldest_seconds", "dlq_depth", "outbox_lag_seconds", "workers")
    for rule in ALL:
        if any(re.search(rf"api_idempotency_{gauge}\b", rule["expr"]) for gauge in gauges):
            assert re.search(r"and (ignoring \(\w+\) )?api_idempotency_store_up == 1", rule["expr"]), rule["alert"]


def test_every_alert_has_a_severity_and_a_runbook_link() -> None:
    for rule in ALL:
        assert re.fullmatch(r"Oncekey[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_an_alert_and_the_doctor_agree_on_what_is_too_long() -> None:
    # R135
    limits = Limits()
    agreed = {
        "OncekeyUnknownOld": f"> {limits.unknown // SECOND}",
        "OncekeyOutboxLag": f"> {limits.due // SECOND}",
        "OncekeySweeperBehind": f"> {limits.stale // SECOND}",
        "OncekeyCompleterBehind": f"> {limits.resumable // SECOND}",
        "OncekeyReaperBehind": f"> {limits.expired // SECOND}",
        "OncekeyDeadLetters": f"> {limits.dead}",
        "OncekeyNoWorker": f"< {limits.workers}",
    }
    found = {rule["alert"]: re.findall(r"[<>] \d+$", rule["expr"]) for rule in ALL}
    assert {alert: found[alert] for alert in agreed} == {alert: [limit] for alert, limit in agreed.items()}


def test_a_comment_names_the_threshold_of_every_rule() -> None:
    for rule in ALL:
        comment = re.findall(rf"((?: +#.*\n)+) +- alert: {rule['alert']}\n", FILES[ALERTS])
        assert len(comment) == 1, rule["alert"]
        assert "# Threshold" in comment[0]
        for number in re.findall(r"[<>]=? ([\d.]+)", rule["expr"]):
            assert re.search(rf"\b{re.escape(number)}\b", comment[0]) or number == "0", f"{rule['alert']}: {number}"


# On series


def healthy(**changed: str) -> dict[str, str]:
    """A shop in which all is well, for an hour and more; a change names a metric, or one with its labels."""
    own: dict[str, str] = {"store_up": "1x200", "dlq_depth": "0x200", "outbox_lag_seconds": "0x200"}
    own |= {f'workers{{task="{task}"}}': "1x200" for task in NAMES}
    own |= {f'waiting_oldest_seconds{{what="{what}"}}': "0x200" for what in WAITING}
    own['requests_total{operation="pay",outcome="new"}'] = "0+600x200"
    for name in ("reserve_key_misuse", "store_error", "zombie_key"):
        own[f"{name}_count_total"] = "0x200"
    return {_series(name): values for name, values in (own | changed).items()}


def _series(name: str) -> str:
    bare, _, labels = name.partition("{")
    return f'api_idempotency_{bare}{{instance="one"{"," if labels else ""}{labels.rstrip("}")}}}'


def _oldest(what: str) -> str:
    return f'waiting_oldest_seconds{{what="{what}"}}'


def _alert(name: str, severity: str = "critical", **labels: str) -> str:
    return ",".join([f'alertname="{name}"', f'severity="{severity}"', *(f'{one}="{of}"' for one, of in labels.items())])


def _pair(alert: str, minutes: int, bad: dict[str, str], good: dict[str, str], *, also: str = "") -> Iterator[Case]:
    name = re.findall(r'alertname="(\w+)"', alert)[0]
    yield Case(f"{name}{also} fires", healthy(**bad), minutes, (alert,))
    yield Case(f"{name}{also} does not yet", healthy(**good), minutes)


REFUSED = 'requests_total{operation="pay",outcome="idempotency_store_unavailable"}'
BYPASSED = 'requests_total{operation="ping",outcome="bypassed"}'
MISUSED = 'tenant_key_misuse_total{tenant="acme"}'
REPEATED = 'tenant_duplicates_total{tenant="acme"}'
SHORT = 'short_lease_total{operation="pay"}'
AND_NOBODY_WORKS = {f'workers{{task="{task}"}}': "0x200" for task in NAMES}

CASES = [
    Case("all is well", healthy(), 100),
    # 1% of 600 and 7 a minute is a little more than 6.
    *_pair(_alert("OncekeyReservationsFail"), 20, {REFUSED: "0+7x200"}, {REFUSED: "0+6x200"}),
    Case("OncekeyReservationsFail waits for two minutes", healthy(**{REFUSED: "0x18 50+50x20"}), 19),
    *_pair(_alert("OncekeyUnprotectedRuns", "warning"), 20, {BYPASSED: "2x12 2+1x20"}, {BYPASSED: "2x200"}),
    Case("OncekeyUnprotectedRuns fires for a line that is new", healthy(**{BYPASSED: "_x15 3x20"}), 18,
         (_alert("OncekeyUnprotectedRuns", "warning"),)),
    *_pair(_alert("OncekeyMisuseSpike", "warning", tenant="acme"), 30, {MISUSED: "0+1.5x60"}, {MISUSED: "0+1.2x60"}),
    *_pair(_alert("OncekeyMisuseSpike", "warning"), 30,
           {"reserve_key_misuse_count_total": "0+7x60"}, {"reserve_key_misuse_count_total": "0+6x60"},
           also=" of all"),
    Case("OncekeyMisuseSpike leaves out who shares a line",
         healthy(**{'tenant_key_misuse_total{tenant="other"}': "0x20 500x20"}), 25),
    # 200 in a quarter of an hour are 13.4 a minute, and four times as many as an hour before are 20.
    *_pair(_alert("OncekeyDuplicateSpike", "warning", tenant="acme"), 100,
           {REPEATED: "0+5x80 400+21x80"}, {REPEATED: "0+5x80 400+19x80"}),
    *_pair(_alert("OncekeyDuplicateSpike", "warning", tenant="acme"), 40,
           {REPEATED: "_x20 0+14x80"}, {REPEATED: "_x20 0+13x80"}, also=" of who is new"),
    *_pair(_alert("OncekeyLeaseTooShort", "warning", operation="pay"), 90, {SHORT: "1x60 2x60"}, {SHORT: "2x200"}),
    Case("OncekeyLeaseTooShort fires for a line that is new", healthy(**{SHORT: "_x30 1x60"}), 40,
         (_alert("OncekeyLeaseTooShort", "warning", operation="pay"),)),
    *_pair(_alert("OncekeyStoreDown"), 20, {"store_up": "1x16 0x20"}, {"store_up": "1x18 0x20"}),
    *_pair(_alert("OncekeyStoreErrors", "warning"), 20,
           {"store_error_count_total": "0+0.6x60"}, {"store_error_count_total": "0+0.5x60"}),
    Case("OncekeyMetricsMissing fires", {}, 11, ('alertname="OncekeyMetricsMissing",severity="warning"',)),
    Case("OncekeyMetricsMissing does not yet", {}, 9),
    *_pair(_alert("OncekeyUnknownOld"), 20, {_oldest("unknown"): "3601x60"}, {_oldest("unknown"): "3600x60"}),
    *_pair(_alert("OncekeyGivenUp"), 20,
           {"reconcile_failed_count_total": "1x10 2x20"}, {"reconcile_failed_count_total": "2x60"}),
    Case("OncekeyGivenUp fires for a line that is new", healthy(reconcile_failed_count_total="_x15 1x20"), 18,
         (_alert("OncekeyGivenUp"),)),
    *_pair(_alert("OncekeyDeadLetters", "warning"), 20, {"dlq_depth": "0x10 1x20"}, {"dlq_depth": "1x10 0x20"}),
    *_pair(_alert("OncekeyOutboxLag"), 20, {"outbox_lag_seconds": "301x60"}, {"outbox_lag_seconds": "300x60"}),
    *_pair(_alert("OncekeyNoWorker"), 20, AND_NOBODY_WORKS, AND_NOBODY_WORKS | {'workers{task="sweeper"}': "1x60"}),
    Case("OncekeyNoWorker waits", healthy(**dict.fromkeys(AND_NOBODY_WORKS, "1x16 0x20")), 20),
    *_pair(_alert("OncekeyZombies", "warning"), 30,
           {"zombie_key_count_total": "0+0.4x60"}, {"zombie_key_count_total": "0+0.3x60"}),
    *_pair(_alert("OncekeySweeperBehind", "warning"), 20, {_oldest("stale"): "306x60"}, {_oldest("stale"): "305x60"}),
    *_pair(_alert("OncekeyCompleterBehind", "warning"), 20,
           {_oldest("resumable"): "3601x60"}, {_oldest("resumable"): "3600x60"}),
    *_pair(_alert("OncekeyReaperBehind", "warning"), 20,
           {_oldest("expired"): "86401x60"}, {_oldest("expired"): "86400x60"}),
    Case("what waits is given a moment to be worked off",
         healthy(**{"outbox_lag_seconds": "0x19 400x20", _oldest("stale"): "0x18 400x20",
                    _oldest("expired"): "0x14 90000x20"}), 20),
    # What a process saw before it lost the store is not told again and again; that it lost it is.
    Case("gauges of who does not reach the store are left out",
         healthy(**{"store_up": "0x60", "dlq_depth": "7x60", "outbox_lag_seconds": "400x60",
                    **{_oldest(what): "90000x60" for what in WAITING}, **AND_NOBODY_WORKS}), 20,
         (_alert("OncekeyStoreDown"),)),
]  # fmt: skip


def test_every_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    # R129, R149, R191, R192, R212, R213, R255
    assert len({case.name for case in CASES}) == len(CASES)
    assert "SUCCESS" in try_out(RULES, CASES, tmp_path)
    fired = {re.findall(r'alertname="(\w+)"', one)[0] for case in CASES for one in case.firing}
    assert fired == {rule["alert"] for rule in ALL}


def test_thresholds_labels_and_severities_can_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(edited(ALERTS, ("> 3600", "> 900"), ("by (job", "by (namespace, job"), (": critical", ": p1")))
    series = healthy(**{_oldest("unknown"): "901x60"})
    named = {name.replace("{", '{namespace="north",', 1): values for name, values in series.items()}
    firing = 'alertname="OncekeyUnknownOld",severity="p1",namespace="north"'
    assert "SUCCESS" in try_out(path, [Case("own", named, 20, (firing,))], tmp_path)


def test_the_operators_manifest_has_the_same_rules() -> None:
    assert yaml.safe_load(FILES[OPERATOR_RULES])["spec"] == yaml.safe_load(FILES[ALERTS])


# On what a real shop shows


def recorded(pages: list[bytes]) -> dict[str, str]:
    """Pages of one process, a minute apart, as series: what is not on a page is not there then."""
    series: dict[str, list[str]] = defaultdict(list)
    for minute, page in enumerate(pages):
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    labels = {"instance": "one", **sample.labels}
                    name = ",".join(f'{label}="{value}"' for label, value in labels.items())
                    values = series[f"{sample.name}{{{name}}}"]
                    values += ["_"] * (minute - len(values)) + [f"{sample.value:g}"]
    return {name: " ".join(values) for name, values in series.items()}


def test_alerts_fire_when_the_store_of_a_shop_fails(tmp_path: Path) -> None:
    # R212
    rules = tmp_path / "alerts.yaml"
    # After five failures in a row the breaker lets one request through per second only.
    rules.write_text(edited(ALERTS, ("[10m])) > 5", "[10m])) > 2")))
    shop = AsgiShop(f"sqlite:///{tmp_path}/shop.db")

    async def life() -> list[bytes]:
        pages = []
        async with shop.serving():
            for minute in range(15):
                if minute == 9:
                    shop.execute(f"ALTER TABLE {shop.records} RENAME TO gone")
                await asyncio.gather(*(shop.send("/local", f"key-{minute}-{n}-of-this-test") for n in range(3)))
                pages.append(await shop.metrics.page(shop.once))
        return pages

    pages = asyncio.run(life())
    before = Case("while it was there", recorded(pages[:9]), 8, (_alert("OncekeyNoWorker"),))
    firing = (_alert("OncekeyReservationsFail"), _alert("OncekeyStoreDown"), _alert("OncekeyStoreErrors", "warning"))
    after = Case("when it was gone", recorded(pages), 14, firing)
    assert "SUCCESS" in try_out(rules, [before, after], tmp_path)


def test_alerts_fire_for_unresolved_work_in_a_real_store(tmp_path: Path) -> None:
    # R129, R135, R213
    shop = AsgiShop(f"sqlite:///{tmp_path}/shop.db")
    shop.go_on.set()

    async def life() -> bytes:
        async with shop.serving():
            assert await shop.send("/inline", "a-key-that-is-in-doubt", does="wait and fail") == 500
            assert await shop.send("/local", "a-key-with-a-message", emit="unloved") == 201
            assert await shop.send("/local", "a-key-with-a-message-2", emit="late") == 201
        await shop.work("relay")
        async with shop.serving():
            assert await shop.send("/local", "a-key-whose-parcel-waits", emit="tea") == 201
            assert await shop.send("/local", "a-key-that-has-expired") == 201
            hours = 3600 * SECOND
            shop.execute(f"UPDATE {shop.records} SET created_at = created_at - {2 * hours} WHERE state = 'unknown'")
            shop.execute("UPDATE oncekey_outbox SET due_at = due_at - 400000000")
            shop.execute(f"UPDATE {shop.records} SET expires_at = created_at - {25 * hours} WHERE key LIKE '%expired'")
            return await shop.metrics.page(shop.once)

    page = asyncio.run(life())
    firing = [_alert(name) for name in ("OncekeyUnknownOld", "OncekeyGivenUp", "OncekeyOutboxLag", "OncekeyNoWorker")]
    firing += [_alert(name, "warning") for name in ("OncekeyDeadLetters", "OncekeyReaperBehind")]
    assert "SUCCESS" in try_out(RULES, [Case("a shop", recorded([page] * 15), 14, firing)], tmp_path)
