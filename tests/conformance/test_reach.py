"""What an API needs help with: other names, a second instance, crashes, outages, leases, declines, large answers.

Each is tried on a server that does it right and on servers that do not, over real sockets.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

from conformance.aiming import JSON, SHORT, demo_target, shop_target
from conformance.control import Control
from conformance.fronts import Front
from conformance.mutants import REACHED
from conformance.shop import Bug, Shop, Stored
from harness.certificates import certificate
from harness.demo import Demo
from harness.postgres import PostgresServer
from harness.served import Served
from oncekey import LOCAL, SINGLE_TENANT, Once
from oncekey_check import (
    Address,
    CannotCheckError,
    CheckProfile,
    CheckReport,
    Failed,
    Skipped,
    Target,
    check,
    chosen,
)
from oncekey_check.carrier import Carrier
from oncekey_check.headlines import Harm


def _check(target: Target, *only: str, profile: CheckProfile = CheckProfile.STRICT_MONEY) -> CheckReport:
    return check(target, profile=profile, clauses=chosen(only))


def _told(report: CheckReport) -> dict[str, str]:
    return {finding.clause.id: finding.headline for finding in (*report.failed, *report.advice)}


def _all_passed(report: CheckReport) -> bool:
    """Nothing is wrong by the report's profile, and nothing was left out."""
    return len(report.passed) + len(report.allowed) == len(report.findings)


# Other names


def test_check_supports_other_key_header_and_replay_marker_names() -> None:
    carrier = Carrier("PayPal-Request-Id", marker="X-Cache", marked_by="hit")
    with Shop() as shop, Front(shop.url, header="PayPal-Request-Id", marker="X-Cache") as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), carrier=carrier)
        report = _check(target, "keys", "replays", "mismatches", "tenants", "failures")
    assert _all_passed(report), _told(report)


def test_missing_custom_replay_marker_is_reported_by_its_name() -> None:
    carrier = Carrier("PayPal-Request-Id", marker="X-Cache", marked_by="hit")
    with Shop(Bug.NO_MARKER) as shop, Front(shop.url, header="PayPal-Request-Id", marker="X-Cache") as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), carrier=carrier)
        report = _check(target, "replays.marked", "others.described")
    verdicts = {one.clause.id: one.verdict for one in report.findings}
    marked, described = verdicts["replays.marked"], verdicts["others.described"]
    assert isinstance(marked, Failed)
    assert marked.expected == "X-Cache: hit on a replay"
    assert isinstance(described, Failed)  # the shop describes Idempotency-Key, which is not the name
    assert "the header PayPal-Request-Id" in described.expected


def test_check_supports_a_key_in_the_body() -> None:
    with Shop() as shop, Front(shop.url, member="client_token") as front:
        address = Address.parse(f"{front.url}/orders")
        target = shop_target(shop, address=address, other_address=None, carrier=Carrier(member="client_token"))
        report = _check(target, "keys", "replays", "mismatches.status", "mismatches.nothing-happens", "tenants")
    assert _told(report) == {}
    skipped = {one.clause.id for one in report.findings if isinstance(one.verdict, Skipped)}
    assert {"keys.quoted", "keys.malformed", "keys.field-name"} <= skipped
    assert "keys.missing" not in skipped


def test_check_finds_a_missing_fingerprint_with_a_key_in_the_body() -> None:
    with Shop(Bug.NO_FINGERPRINT) as shop, Front(shop.url, member="client_token") as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), carrier=Carrier(member="client_token"))
        report = _check(target, "mismatches.nothing-happens")
    assert list(_told(report)) == ["mismatches.nothing-happens"]


def test_409_for_a_different_body_passes_only_the_conflict_profile() -> None:
    with Shop(Bug.MISMATCH_409) as shop:
        only = ("mismatches.status", "mismatches.while-running")
        report = _check(shop_target(shop), *only, profile=CheckProfile.CONFLICT)
        assert _all_passed(report)
        assert (report.partial, report.matches) == (True, []), "two clauses show no profile"
        assert "mismatches.status" in _told(_check(shop_target(shop), *only))
    with Shop() as shop:
        report = _check(shop_target(shop), *only, profile=CheckProfile.CONFLICT)
    assert "mismatches.status" in _told(report)


# A second instance


def test_two_demos_on_one_store_pass_the_instance_clauses(tmp_path: Path) -> None:
    # R246
    store = f"sqlite:///{tmp_path}/both.db"
    with Demo(tmp_path, store=store) as one, Demo(tmp_path, store=store) as two:
        target = demo_target(one.url)
        report = _check(_with(target, also_address=Address.parse(f"{two.url}/orders")), "instances")
    assert _all_passed(report), _told(report)


def test_instances_with_separate_key_stores_are_found() -> None:
    with Shop() as one, Shop() as two:
        two.orders = one.orders  # what is sold is in one place, and keys are not
        report = _check(shop_target(one, also_address=Address.parse(f"{two.url}/orders")), "instances")
    assert _told(report) == {
        "instances.replayed": "2 orders from one key: the retry went to the second instance",
        "instances.race": "2 orders from one key: it arrived at two instances at the same moment",
    }
    assert [group.root.clause.id for group in report.groups] == ["instances.replayed"]


# Crashes


def test_demo_passes_the_crash_and_lease_clauses(tmp_path: Path) -> None:
    # R75, R86
    with Demo(tmp_path, "--lease", "0.5") as demo:

        def crash() -> None:
            demo.kill()
            demo.start()

        with Control(crash=crash) as control:
            target = _with(demo_target(demo.url), crash_command=control.command("crash"), lease=0.5)
            report = _check(target, "crashes", "leases")
    assert _all_passed(report), _told(report)
    assert control.asked == ["crash"] * 3


@contextmanager
def _crashing(shop: Shop, crash: object, **more: object) -> Iterator[Target]:
    with Control(crash=crash) as control:
        yield shop_target(shop, crash_command=control.command("crash"), **more)


def test_a_shop_that_forgets_its_keys_in_a_crash_is_found() -> None:
    with Shop() as shop, _crashing(shop, shop.records.clear, slow=("X-Slow", "0.9")) as target:
        report = _check(target, "crashes")
    assert set(_told(report)) == {"crashes.remembered", "crashes.one-effect"}
    assert {finding.harm for finding in report.failed} == {Harm.TWICE}
    assert "the server crashed during the first request" in _told(report)["crashes.one-effect"]


def test_a_shop_whose_locks_outlive_a_crash_is_found() -> None:
    with Shop() as shop:

        def crash() -> None:
            """The lock is in the store; who held it is gone."""
            for place, stored in list(shop.records.items()):
                if not stored.status:
                    shop.records[place] = Stored(stored.fingerprint)

        with _crashing(shop, crash, slow=("X-Slow", "0.9"), patience=SHORT) as target:
            report = _check(target, "crashes")
    assert _told(report) == {"crashes.answered": "After a crash the key stays locked: retries receive 'wait'"}


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("no-such-program",), "--crash-command cannot be run"),
        (
            (sys.executable, "-c", "import sys; sys.exit('no right to do that')"),
            "ended with code 1: no right to do that",
        ),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "--crash-command took longer than 1 s"),
    ],
)
def test_failed_crash_command_skips_the_clause(words: tuple[str, ...], because: str) -> None:
    with Shop() as shop:
        report = _check(shop_target(shop, crash_command=words, command_limit=1.0), "crashes.remembered")
    (finding,) = report.findings
    assert isinstance(finding.verdict, Skipped)
    assert because in finding.verdict.because


def test_a_command_is_not_read_by_a_shell(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    words = (sys.executable, "-c", program, str(mark), "$HOME; $(id)")
    with Shop() as shop:
        assert _all_passed(_check(shop_target(shop, crash_command=words), "crashes.remembered"))
    assert mark.read_text() == "$HOME; $(id)"


def test_server_that_does_not_restart_skips_the_crash_clause() -> None:
    with Shop() as shop, Front(shop.url) as front, Control(crash=front.close) as control:
        address = Address.parse(f"{front.url}/orders")
        target = shop_target(
            shop, address=address, crash_command=control.command("crash"), command_limit=1.0, patience=0.3
        )
        (finding,) = _check(target, "crashes.remembered").findings
    assert isinstance(finding.verdict, Skipped)
    assert "did not respond within 1 s" in finding.verdict.because


# Outages of the store


def test_demo_rejects_requests_during_a_postgresql_outage_and_recovers(tmp_path: Path) -> None:
    # R110, R250
    with (
        PostgresServer() as server,
        Demo(tmp_path, store=server.create_database("shop")) as demo,
        Control(down=server.stop, up=server.start) as control,
    ):
        commands = {f"store_{name}_command": control.command(name) for name in ("down", "up")}
        report = _check(_with(demo_target(demo.url), **commands), "outages")
    assert _all_passed(report), _told(report)
    assert control.asked == ["down", "up"] * 4


class _Flaky:
    """A shop whose store can be stopped, and what it does then."""

    def __init__(self, shop: Shop) -> None:
        self.shop, self.down = shop, False

    def stop(self) -> None:
        self.down = True

    def start(self) -> None:
        self.down = False

    def start_empty(self) -> None:
        self.down = False
        self.shop.records.clear()


@contextmanager
def _outage(shop: Shop, flaky: _Flaky, start: object, **front: object) -> Iterator[Target]:
    with Front(shop.url, **front) as before, Control(down=flaky.stop, up=start) as control:
        yield shop_target(
            shop,
            address=Address.parse(f"{before.url}/orders"),
            store_down_command=control.command("down"),
            store_up_command=control.command("up"),
        )


def test_a_shop_that_executes_while_its_store_is_down_is_found() -> None:
    with Shop(Bug.MISSING_RUNS) as shop:
        flaky = _Flaky(shop)
        with _outage(shop, flaky, flaky.start, unprotected=lambda _: flaky.down) as target:
            report = _check(target, "outages")
    assert _told(report) == {
        "outages.closed": "While the store was down a request was executed, and nothing protects its retries",
        "outages.recovered": "2 orders from one key: the first request was sent during an outage of the store",
    }


def test_shop_that_loses_keys_in_a_store_outage_is_found() -> None:
    with Shop() as shop:
        flaky = _Flaky(shop)

        def answer(headers: object) -> tuple[int, bytes] | None:
            if not flaky.down:
                return None
            # It locked the key in one place before it saw that the other one is down.
            shop.records["alpha", headers["Idempotency-Key"].strip('"')] = Stored("")
            return 500, b"{}"

        with _outage(shop, flaky, flaky.start, answer=answer) as target:
            report = _check(replace(target, patience=SHORT), "outages.reported", "outages.recovered")
        assert set(_told(report)) == {"outages.reported", "outages.recovered"}
        with _outage(shop, flaky, flaky.start_empty) as target:
            report = _check(target, "outages.remembered")
    assert _told(report) == {
        "outages.remembered": "2 orders from one key: the store was down between the request and its retry"
    }


def test_failed_store_up_command_aborts_the_run() -> None:
    fails = (sys.executable, "-c", "raise SystemExit(3)")
    with Shop() as shop:
        target = shop_target(shop, store_down_command=("true",), store_up_command=fails)
        with pytest.raises(CannotCheckError, match="the store is down, and nothing more can be checked"):
            _check(target, "outages")


# Leases


class _Leased(dict):
    """Keys of which a retry takes over those that are locked for too long, although they still run."""

    def __init__(self, lease: float) -> None:
        super().__init__()
        self._lease, self._since = lease, {}

    def __setitem__(self, place: object, stored: Stored) -> None:
        self._since[place] = time.monotonic()
        super().__setitem__(place, stored)

    def get(self, place: object, default: object = None) -> object:
        stored = super().get(place, default)
        late = time.monotonic() - self._since.get(place, 0.0) > self._lease
        return None if isinstance(stored, Stored) and not stored.status and late else stored


def test_shop_that_reruns_a_request_after_its_lease_is_found() -> None:
    with Shop() as shop:
        shop.records = _Leased(0.3)
        report = _check(shop_target(shop, lease=0.3, patience=2.0), "leases")
        (finding,) = report.failed
        assert finding.headline == "2 orders from one key: the first request was still running when its lease expired"
        without = _check(shop_target(shop, lease=0.3, slow=("X-Slow", "yes")), "leases").findings[0].verdict
    assert isinstance(without, Skipped)
    assert "has no number" in without.because


# Final refusals and large answers


class Sale(BaseModel):
    quantity: int


@pytest.fixture
def till(tmp_path: Path) -> Iterator[str]:
    """A till that is protected by oncekey, declines 13 pieces, and can be made to talk much."""
    once = Once(f"sqlite:///{tmp_path}/till.db", migrate=True)
    app = FastAPI(lifespan=once.lifespan)
    once.install(app, tenant=SINGLE_TENANT)
    sold: list[str] = []

    @app.post("/sales", status_code=201)
    @once.protect(effects=LOCAL, operation="sell")
    async def sell(sale: Sale, x_large: Annotated[str | None, Header()] = None) -> dict[str, str]:
        number = str(uuid.uuid4())
        if sale.quantity == 13:
            raise HTTPException(402, {"code": "declined", "reference": number})
        sold.append(number)
        return {"id": number, "text": "x" * (100_000 if x_large else 1)}

    @app.get("/sales")
    async def sales() -> list[str]:
        return sold

    with Served(app) as served:
        yield f"http://127.0.0.1:{served.port}"


def _till(url: str) -> Target:
    return Target(
        address=Address.parse(f"{url}/sales"),
        body=b'{"quantity": 2}',
        headers=(JSON,),
        declined_body=b'{"quantity": 13}',
        large=("X-Large", "yes"),
        count_address=Address.parse(f"{url}/sales"),
    )


def test_oncekey_replays_declined_and_large_responses(till: str) -> None:
    # R88, R97
    report = _check(_till(till), "finals")
    assert _all_passed(report), _told(report)


def test_shop_that_does_not_replay_a_declined_response_is_found() -> None:
    def answer(headers: object) -> tuple[int, bytes] | None:
        is_declined = headers["Content-Length"] == "4"
        return (402, uuid.uuid4().hex.encode()) if is_declined else None

    with Shop() as shop, Front(shop.url, answer=answer) as front:
        target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), declined_body=b"null")
        report = _check(target, "finals.declined")
        assert _told(report) == {"finals.declined": "A final refusal was decided again for the retry"}
        assert "finals.declined" in _told(_check(target, "finals.declined", profile=CheckProfile.IETF))
        # What always looks the same proves nothing, and what is taken is no refusal.
        same = Front(shop.url, answer=lambda headers: (402, b"no") if headers["Content-Length"] == "4" else None)
        with same as blind:
            target = shop_target(shop, address=Address.parse(f"{blind.url}/orders"), declined_body=b"null")
            unseen = _check(target, "finals.declined").findings[0].verdict
        taken = (
            _check(shop_target(shop, declined_body=b'{"item": "cup", "quantity": 3}'), "finals.declined")
            .findings[0]
            .verdict
        )
    assert isinstance(unseen, Skipped)
    assert isinstance(taken, Skipped)
    assert "not a final 4xx" in taken.because


def test_shop_that_does_not_store_large_responses_is_found() -> None:
    with Shop(Bug.MISSING_RUNS) as shop:
        front = Front(
            shop.url,
            unprotected=lambda headers: "X-Large" in headers,
            padding=lambda headers: int(headers.get("X-Large", "0")),
        )
        with front:
            target = shop_target(shop, address=Address.parse(f"{front.url}/orders"), large=("X-Large", "9"))
            small = _check(target, "finals.large").findings[0].verdict
            report = _check(_with(target, large=("X-Large", "100000")), "finals.large")
    assert isinstance(small, Skipped)
    assert "smaller than 65536 bytes" in small.because
    headline = "2 orders from one key: its response was large, and the retry was executed"
    assert _told(report) == {"finals.large": headline}


# Certificates


def test_check_sends_nothing_to_a_server_with_an_untrusted_certificate(tmp_path: Path) -> None:
    shown, key = certificate(tmp_path)
    with Served(_app_of_nothing(), ssl_certfile=str(shown), ssl_keyfile=str(key)) as served:
        url = f"https://localhost:{served.port}/"
        target = Target(address=Address.parse(url, str(shown)), body=b"{}", headers=(JSON,))
        assert _check(target, "replays.one-effect").sent > 0
        with pytest.raises(CannotCheckError, match="certificate verify failed"):
            _check(Target(address=Address.parse(url), body=b"{}", headers=(JSON,)), "replays.one-effect")


def _app_of_nothing() -> FastAPI:
    app = FastAPI()

    @app.post("/", status_code=201)
    async def nothing() -> dict[str, str]:
        return {"id": str(uuid.uuid4())}

    return app


def test_every_clause_with_extra_needs_is_broken_by_a_test_server() -> None:
    named = {clause for clauses in REACHED.values() for clause in clauses}
    assert named == {clause.id for clause in chosen(["finals", "instances", "leases", "crashes", "outages"])}


def _with(target: Target, **more: object) -> Target:
    return replace(target, **more)
