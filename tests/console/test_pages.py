"""What the pages say, on both stores."""

from __future__ import annotations

import base64
import json
import re
import uuid
from decimal import Decimal

import pytest

from console.trouble import ACME, DONE_KEY, INLINE_KEY, NASTY, OUTBOX_KEY, PHASED_KEY, ZETA, fill, noted, opened, put
from console.visiting import ANN, Visitor, console_on, said
from oncekey.console import Console, Ledger
from oncekey.console.dossier import record_id_of, token_of
from oncekey.core.model import HOUR, MINUTE, SECOND, Effects, EntryKind, MemoEntry, RecordId, State, StoredResponse
from oncekey.core.transitions import Actor, Mover, Note, Trigger
from oncekey.core.upkeep import Expired
from oncekey.ops.stats import ENDINGS, End, Recent, Sample, series
from oncekey.reconcile import LedgerEntry


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    return request.getfixturevalue("empty_dsn")


@pytest.fixture
def trouble(url):
    with opened(url) as world:
        fill(world, finished=60)
        yield world


async def test_overview_shows_counts_and_worker_status(url, trouble):  # R135, R213
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        page = await visitor.get("")
        assert '<a href="/unknown">3 unknown outcomes</a> and <a href="/letters">4 dead letters</a>' in page.text
        words = said(page)
        assert "3 unknown outcomes and 4 dead letters need attention." in words
        for tile in ("Unknown 3", "Dead letters 4", "Stuck 1", "Retryable 7", "In progress 2", "Pending 1"):
            assert tile in words
        assert re.search(r"worker-a:211 alive, last heartbeat \d+ s ago ?; started \d+ s ago", words)
        live = said(await visitor.get("live"))
        assert "need attention" in live
        assert "<html" not in live


async def test_overview_of_an_empty_store_only_reports_missing_workers(url):
    with opened(url) as world:
        async with Visitor(console_on(url)) as visitor:
            await visitor.log_in()
            assert "No worker is alive" in said(await visitor.get(""))
            world.go(world.store.upkeep.beat("w", ["sweeper"], 10 * SECOND))
            assert "Nothing needs attention." in said(await visitor.get(""))
            assert "Every request is finished" in said(await visitor.get("records"))
            assert "No finished request is stored" in said(await visitor.get("records?state=completed"))
            assert "No unknown outcomes" in said(await visitor.get("unknown"))
            assert "No dead letters" in said(await visitor.get("letters"))
            assert "No operator has changed anything" in said(await visitor.get("audit"))


async def test_series_endpoint_returns_chart_data(url, trouble):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        data = (await visitor.get("series.json?window=1+h")).json()
    assert [len(column) for column in data["outcomes"]] == [61] * 5
    assert sum(data["outcomes"][1]) + sum(data["outcomes"][2]) >= 60
    assert sum(data["outcomes"][3]) == 7
    assert any(value for value in data["latency"][1])
    assert data["states"][1] == [3]
    assert data["lag"][2][0] > 3600


async def test_record_list_is_filtered_and_paginated(url, trouble):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()

        async def keys(path):
            return re.findall(r'title="([^"]+)"><code>', (await visitor.get(path)).text)

        assert len(await keys("records")) == 13
        assert await keys("records?state=stuck") == ["checkout-7701"]
        assert len(await keys("records?error=status_503&tenant=zeta")) == 3
        assert await keys("records?operation=create_refund&state=pending") == ["refund-881"]
        assert await keys("records?effects=inline") == [INLINE_KEY]
        assert set(await keys("records?older=30m")) == {INLINE_KEY, PHASED_KEY}
        assert "Enter an age as 90s" in said(await visitor.get("records?older=soon"))
        assert "No match" in said(await visitor.get("records?operation=none"))

        page = await visitor.get("records?state=completed")
        found = re.findall(r'title="([^"]+)"><code>', page.text)
        while further := re.search(r'hx-get="/([^"]+)"', page.text):
            page = await visitor.get(further[1].replace("&amp;", "&"), headers={"hx-request": "true"})
            assert "<html" not in page.text
            found += re.findall(r'title="([^"]+)"><code>', page.text)
        assert len(found) == len(set(found)) == 63


async def test_search_finds_a_record_by_key_prefix_or_reference(url, trouble):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        for known in (PHASED_KEY, f'"{PHASED_KEY}"', "ch_3Pq8"):
            assert PHASED_KEY in (await visitor.get(await visitor.find(known))).text
        assert DONE_KEY in (await visitor.get(await visitor.find(DONE_KEY))).text
        several = await visitor.post("find", key="order-2026-11-00")
        assert several.text.count("/record/") >= 50
        assert several.url.query == b""  # what was looked for is in nobody's log
        assert "Key not found" in said(await visitor.post("find", key="no-such-key"))
        for short in ("or", PHASED_KEY[:3]):
            found = await visitor.post("find", key=short)
            assert "With fewer than four characters" in said(found)
            assert "/record/" not in found.text
        assert "Key not found" in said(await visitor.post("find", key=PHASED_KEY, tenant="zeta"))
        assert (await visitor.post("find", key="")).headers["location"] == "/records"


async def test_record_page_explains_the_state_and_shows_the_timeline(url, trouble):
    console = console_on(
        url,
        trace_url="https://traces.example/trace/{trace}",
        links=lambda record: {"Logs": f"https://logs.example/{record.operation}", "Bad": "javascript:alert(1)"},
    )
    async with Visitor(console) as visitor:
        await visitor.log_in()
        page = await visitor.get(await visitor.find(PHASED_KEY))
        words = said(page)
        assert "Unknown: the call 'charge_created' may have been made" in words
        assert "Nothing is executed until it is resolved" in words
        assert "A resolver has checked 3 times and will check again." in words
        assert "Provider checks 3, next" in words
        put(trouble, State.UNKNOWN, Effects.INLINE, "late", reconcile_after=trouble.clock.now - MINUTE)
        assert "Provider checks 0, overdue since" in said(await visitor.get(await visitor.find("late", "acme")))
        story = trouble.record(RecordId(ACME, PHASED_KEY)).incarnation.hex
        assert f'href="https://traces.example/trace/{story}"' in page.text
        assert 'href="https://logs.example/create_order"' in page.text
        assert "javascript:" not in page.text
        timeline = words.partition("Timeline")[2]
        places = [
            timeline.index(one)
            for one in (
                "request received",
                "checked with the provider: still unknown 3 times last: no answer in 10 s",
                "announced",
            )
        ]
        assert places == sorted(places)
        assert "by resolver worker-a:211, fence 3" in timeline
        assert "ch_3Pq8" in words


async def test_showing_record_contents_is_audited(url, trouble):
    # A number that was drawn may have the same digits in it.
    secrets = [re.compile(rf"(?<![\w-]){secret}(?![\w-])") for secret in ("o_1017", "4242", "r_77")]
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        path = await visitor.find(PHASED_KEY)
        veiled = await visitor.get(path)
        assert not any(secret.search(veiled.text) for secret in secrets)
        shown = await visitor.post(path, why="the customer called")
        assert all(secret.search(shown.text) for secret in secrets)
        assert "contents shown" in said(shown)
        again = await visitor.get(path)
        assert not any(secret.search(again.text) for secret in secrets)
        audit = said(await visitor.get("audit"))
        assert "ann operator contents shown unknown the customer called" in audit
    record_id = RecordId(ACME, PHASED_KEY)
    notes = [entry.note for entry in trouble.go(trouble.store.audit.history(record_id))]
    assert (notes[-1].trigger, notes[-1].actor, notes[-1].who) == (Trigger.DISCLOSE, Actor.OPERATOR, "ann")
    record = trouble.record(record_id)
    assert (record.version, record.fence) == (7, 3)


async def test_audit_page_shows_operators_or_all_actors(url, trouble):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        assert "no answer in 10 s" not in said(await visitor.get("audit"))
        record = trouble.record(RecordId(ACME, PHASED_KEY))
        noted(trouble, Note.of(record, State.UNKNOWN, Trigger.DOUBT, Mover(Actor.WORKER, "w"), "call_uncertain"))
        everybody = said(await visitor.get("audit?who=all"))
        assert "no answer in 10 s" in everybody
        assert "outcome became unknown unknown an external call got no reply" in everybody


async def test_record_page_tells_how_to_see_the_key_of_an_inline_call(url, trouble):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        put(trouble, State.UNKNOWN, Effects.INLINE, "transfer-0001", last_error="handler_raised", operation="transfer")
        page = await visitor.find("transfer-0001")
        hint = "oncekey keys show --call NAME KEY"
        assert hint in said(await visitor.get(page))
        assert hint not in said(await visitor.get(await visitor.find(PHASED_KEY)))
        trouble.go(trouble.store.upkeep.beat("w", ["relay"], 10 * SECOND, {"transfer": ["charge_card"]}))
        words = said(await visitor.get(page))
        assert hint not in words
        assert "Downstream key of charge_card" in words


async def test_queue_pages_show_references_for_the_provider(url, trouble):
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        words = said(await visitor.get("unknown"))
        assert "Downstream key of charge:" in words
        assert "given up checked with the provider 8 times, not checked again" in words
        places = [words.index(key) for key in (PHASED_KEY, INLINE_KEY, OUTBOX_KEY)]
        assert places == sorted(places)  # the oldest comes first
        letters = await visitor.get("letters")
        assert letters.text.count('class="line"') == 4
        (defer,) = [
            one.parcel for one in trouble.go(trouble.store.outbox.dead_letters(9)) if one.parcel.kind == "defer"
        ]
        page = await visitor.get(f"letter/{defer.id}")
        assert "A request's own call" in said(page)
        assert f'/record/{token_of(defer.record_id)}">the page of its request</a>' in page.text
        assert (await visitor.get(f"letter/{uuid.uuid4()}")).status_code == 404
        assert (await visitor.get("letter/nonsense")).status_code == 404


async def test_pages_escape_all_text_from_clients_and_providers(url):
    with opened(url) as world:
        memo = (MemoEntry(NASTY, EntryKind.PHASE, json.dumps(NASTY)),)
        put(
            world, State.FAILED_RETRYABLE, Effects.PHASED, NASTY, scope=NASTY, operation=NASTY, path=f"/{NASTY}",
            method=NASTY, last_error=NASTY, memo=memo, recovery_point=NASTY,
        )  # fmt: skip
        answer = StoredResponse(200, ((b"x-nasty", NASTY.encode()),), NASTY.encode())
        put(world, State.COMPLETED, Effects.LOCAL, f"done{NASTY}", scope=ZETA, response=answer)
        world.go(world.store.upkeep.beat(NASTY, [NASTY], SECOND))
        async with Visitor(console_on(url)) as visitor:
            await visitor.log_in()
            pages = [await visitor.get(path) for path in ("", "records", "records?state=completed")]
            for record_id in (RecordId(NASTY, NASTY), RecordId(ZETA, f"done{NASTY}")):
                pages += [
                    await visitor.get(f"record/{token_of(record_id)}"),
                    await visitor.post(f"record/{token_of(record_id)}", why=NASTY),
                ]
            pages += [await visitor.get("audit")]
            pages += [await visitor.post("find", key=NASTY + "x", tenant=NASTY)]
            pages += [await visitor.get("records", params={"tenant": NASTY, "operation": NASTY, "error": NASTY})]
            pages += [await visitor.get("login", params={"next": NASTY})]
    for page in pages:
        assert page.status_code in {200, 422}, page.text
        assert "<img src=x" not in page.text
        assert 'src="x"' not in page.text
        assert "&lt;img src=x" in page.text


async def test_what_cannot_be_shown_as_text_is_shown_as_base64(url):
    with opened(url) as world:
        put(world, State.COMPLETED, Effects.LOCAL, "binary", response=StoredResponse(200, (), b"\xff\xfe\x00"))
        async with Visitor(console_on(url)) as visitor:
            await visitor.log_in()
            path = await visitor.find("binary")
            assert "//4A" in (await visitor.post(path)).text


def coded(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


async def test_invalid_record_url_returns_a_404_page(url):
    with opened(url):
        async with Visitor(console_on(url)) as visitor:
            await visitor.log_in()
            strange = [coded(one) for one in ([1, 2], ["a"], {}, ["a", "b\0"], ["a", "\ud800"], ["a", "b"])]
            for token in ("", "abc", "====", "%00", *strange):
                answer = await visitor.get(f"record/{token}")
                assert answer.status_code == 404
                assert "There is no such" in said(answer)
                assert 'href="/unknown"' in answer.text


async def test_keys_that_the_reaper_deleted_together_are_one_line(url):
    with opened(url) as world:
        keys = [put(world, State.COMPLETED, Effects.LOCAL, f"gone-key-{n}", at=48 * HOUR).id for n in range(3)]
        due = Expired(0, world.clock.now)
        assert world.go(world.store.upkeep.purge(due, 10, mover=Mover(Actor.REAPER, "worker-7"))).moved == 3
        async with Visitor(console_on(url)) as visitor:
            await visitor.log_in()
            words = said(await visitor.get("audit?who=all"))
            assert "worker-7 reaper" in words
            assert "expired: 3 keys, expiry 2" in words
            assert "several keys" in words
            answer = await visitor.get(f"record/{token_of(keys[0])}")
            assert answer.status_code == 404
            assert "worker-7 last deleted keys of this tenant at 2" in said(answer)


async def test_pages_ignore_invalid_query_parameters(url):
    places = (
        {"unknown": [1, "a\0", "b"]},
        {"unknown": [2**70, "a", "b"]},
        {"unknown": [1e999, "a", "b"]},
        {"x": 1},
        [1],
    )
    with opened(url):
        async with Visitor(console_on(url)) as visitor:
            await visitor.log_in()
            for path in (
                *(f"records?before={coded(place)}" for place in places),
                "records?before=!!&tenant=%00&operation=a%00b&error=%F0%9F%94%91",
                "records?older=999999d&younger=999999d",
                "records?state=none&effects=none",
                "letters?after=99999999999999999999.x",
                "letters?after=1.00000000-0000-4000-8000-000000000000",
                "audit?before=99999999999999999999",
                "audit?before=9223372036854775807",
                "?window=none",
            ):
                answer = await visitor.get(path)
                assert answer.status_code == 200, path
            for key in ("\0\0\0\0", "a\0bcd", "\U0010ffff" * 5, "%" * 300):
                assert (await visitor.post("find", key=key, tenant="t\0")).status_code in {200, 303}


async def test_unreachable_store_returns_a_503_page(tmp_path):
    async with Visitor(Console("postgresql://nobody@127.0.0.1:9/none", tokens=f"ann:operate:{ANN}")) as visitor:
        await visitor.http.post("login", data={"token": ANN})
        answer = await visitor.get("")
        assert answer.status_code == 503
        assert "The store does not respond" in said(answer)
        assert "nobody@" not in answer.text


async def test_a_store_without_tables_is_a_page(tmp_path):
    async with Visitor(console_on(f"sqlite:///{tmp_path / 'empty.db'}")) as visitor:
        await visitor.http.post("login", data={"token": ANN})
        answer = await visitor.get("")
        assert answer.status_code == 500
        assert "oncekey migrate up" in said(answer)


@pytest.mark.parametrize("key", ["plain", "ключ", "a/b?c#d", NASTY, "\U0001f511"])
def test_record_token_round_trips_any_record_id(key):
    record_id = RecordId(ACME, key)
    token = token_of(record_id)
    assert re.fullmatch(r"[\w-]+", token)
    assert record_id_of(token) == record_id


def test_outcome_series_counts_requests_by_end_time():
    now = 1_000 * MINUTE
    ends = [
        End(State.COMPLETED, None, "a", now - 90 * SECOND, 5_000),
        End(State.COMPLETED, None, "a", now - 91 * SECOND, 0),
        End(State.UNKNOWN, None, "a", now - 90 * SECOND, 0),
        End(State.COMPLETED, None, "a", now - 90 * MINUTE, 7_000),
    ]
    data = series(ends, [], now, 60 * MINUTE)
    columns = dict(zip(ENDINGS, data["outcomes"][1:], strict=True))
    assert (sum(columns["succeeded"]), sum(columns["unknown"])) == (2, 1)
    assert columns["succeeded"][-3:] == [2, 0, 0]
    assert [value for value in data["latency"][1] if value is not None] == [5.0]
    assert data["states"] == [[]] + [[]] * 5


def test_samples_of_one_moment_are_one():
    history = Recent()
    for at in (0, SECOND, 3 * SECOND, 4 * SECOND, 6 * SECOND):
        history.add(Sample(at, 0, 0, 0, 0, 0, 0, 0, 0))
    assert [one.at for one in history.since(SECOND)] == [3 * SECOND, 6 * SECOND]


async def test_no_key_and_no_token_is_logged(url, trouble, caplog):  # R195
    caplog.set_level(0)
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in("a-wrong-token-0123456789")
        await visitor.log_in()
        path = await visitor.find(PHASED_KEY)
        await visitor.get(path)
        await visitor.post(path)
        await visitor.get(f"{path}/move/nonsense")
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("oncekey")]
    assert any("log-in with an invalid token" in line for line in ours)
    assert any("ann logged in" in line for line in ours)
    for secret in (PHASED_KEY, ANN, "a-wrong-token-0123456789", path.removeprefix("record/")):
        assert not any(secret in line for line in ours)


@pytest.mark.parametrize("waits", [False, True], ids=["def", "async def"])
async def test_console_compares_records_with_the_provider_ledger(url, trouble, waits):  # R140
    entries = [LedgerEntry("nobody-sent-this", "ch_orphan", Decimal(1999), "EUR"), LedgerEntry(None, "ch_3Pq8")]
    asked = []

    def booked(since):
        asked.append(since)
        return entries

    async def booked_later(since):
        return booked(since)

    books = Ledger(booked_later if waits else booked, minor_units=waits)
    async with Visitor(console_on(url, ledger=books)) as visitor:
        await visitor.log_in()
        assert "Compares all announced calls and charges of this period." in said(await visitor.get("ledger"))
        words = said(await visitor.post("ledger", span="2h"))
        assert "2 differences in 2 charges and 1 call." in words
        assert "orphan charge the provider has a charge for a call that was never announced" in words
        assert "charged while unknown" in words
        assert ("19.99 EUR" if waits else "1,999 EUR") in words
    assert len(asked) == 1
    async with Visitor(console_on(url)) as visitor:
        await visitor.log_in()
        assert (await visitor.get("ledger")).status_code == 404
        assert (await visitor.post("ledger", span="2h")).status_code == 404
