"""`oncekey dlq`, on SQLite and PostgreSQL."""

from __future__ import annotations

import json
import uuid

import pytest

from cli.operating import KEY, SCOPE, oncekey, refused
from harness import flows
from oncekey.core.deferred import DEAD_LETTER
from oncekey.core.flow import Mode, Transaction, drive
from oncekey.core.model import (
    HOUR,
    MINUTE,
    SECOND,
    Announcement,
    Deferred,
    Effects,
    Parcel,
    ParcelKind,
    RecordId,
    Recovery,
    State,
)
from oncekey.core.policy import Policy
from oncekey.core.transitions import Trigger
from oncekey.testing.claims import a_claim

ID = RecordId(SCOPE, KEY)


CALL = Announcement("charge", "dk-1", "digest", 1, None, 5 * SECOND, 30 * SECOND)


def go(shop, flow):
    return drive(flow, shop.driver.run)


def deferred(shop, *, repeatable=None):
    """A request's own call that was made once, and given up by its worker."""
    lease = flows.begin(shop, a_claim(id=ID, effects=Effects.OUTBOX, recovery=Recovery.RETRY), Policy()).lease
    parcel = Parcel(uuid.uuid4(), ParcelKind.DEFER, ID, lease.incarnation, "charge", '{"amount":7}', "dk-1")
    assert flows.settle(shop, lease, Deferred(parcel)).ours
    box = shop.store.outbox
    (held,) = go(shop, box.due("worker", ("charge",), 10, MINUTE))
    call = Announcement("charge", "dk-1", "digest", 1, repeatable, 5 * SECOND, 30 * SECOND)
    taken = go(shop, box.take_up(held, "worker-1", call, MINUTE))
    go(shop, box.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, "time-out"))
    return parcel


def emitted(shop):
    """A message that could not be delivered."""
    box = shop.store.outbox
    parcel = Parcel(uuid.uuid4(), ParcelKind.EMIT, ID, uuid.uuid4(), "receipts", '{"to":"ann"}', "dk-2")
    transaction = Transaction("put", Mode.ATOMIC, lambda: box.putting((parcel,)))

    def alone():
        return (yield transaction)

    go(shop, alone())
    (held,) = go(shop, box.due("worker", ("receipts",), 10, MINUTE))
    assert go(shop, box.bury(held, "no such mailbox"))
    return parcel


def test_dlq_list_and_show_print_calls_and_messages(shop, url):
    # R138
    call, message = deferred(shop), emitted(shop)
    lines = json.loads(oncekey("dlq", "list", "--store", url, "--json").stdout)["items"]
    # In no order: both may die in one tick of the store's clock.
    assert {(line["id"], line["kind"], line["topic"], line["last_error"]) for line in lines} == {
        (str(call.id), "defer", "charge", "time-out"),
        (str(message.id), "emit", "receipts", "no such mailbox"),
    }
    assert set(lines[0]) == {
        "id", "kind", "topic", "key", "scope", "downstream_key", "attempts", "created_at", "died_at", "first_error",
        "last_error",
    }  # fmt: skip
    assert str(call.id) in oncekey("dlq", "list", "--store", url).stdout
    one = json.loads(oncekey("dlq", "show", str(call.id), "--store", url, "--json").stdout)
    assert (one["payload"], one["key"], one["downstream_key"]) == ('{"amount":7}', KEY, "dk-1")
    assert '{"to":"ann"}' in oncekey("dlq", "show", str(message.id), "--store", url).stdout
    missing = oncekey("dlq", "show", str(uuid.uuid4()), "--store", url)
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert missing.stderr == "oncekey: there is no dead letter with this id\n"


@pytest.mark.parametrize("repeatable", [None, 20 * HOUR], ids=["once", "repeatable"])
def test_dlq_show_prints_only_possible_commands(shop, url, repeatable):
    parcel = deferred(shop, repeatable=repeatable)
    text = oncekey("dlq", "show", str(parcel.id), "--store", url).stdout
    assert (f"oncekey dlq retry {parcel.id}" in text) is (repeatable is not None)
    assert f"oncekey dlq discard {parcel.id}" in text
    closed = "" if repeatable else " --closed"  # within the window sending again is safe
    assert f"oncekey keys resolve {KEY} --tenant acme --not-executed{closed} --reason '...'" in text
    assert f"oncekey keys show {KEY}" in text
    done = ("keys", "resolve", KEY, "--store", url, "--not-executed", *closed.split(), "--reason", "closed there")
    assert oncekey(*done).exit_code == 0
    assert flows.find(shop, ID).record.state is State.PENDING


def test_dlq_show_of_a_call_without_its_request_offers_only_discard(shop, url):
    box = shop.store.outbox
    parcel = Parcel(uuid.uuid4(), ParcelKind.DEFER, ID, uuid.uuid4(), "receipts", "{}", "dk-2")
    transaction = Transaction("put", Mode.ATOMIC, lambda: box.putting((parcel,)))

    def alone():
        return (yield transaction)

    go(shop, alone())
    (held,) = go(shop, box.due("worker", ("receipts",), 10, MINUTE))
    assert go(shop, box.bury(held, "no such request"))
    text = oncekey("dlq", "show", str(parcel.id), "--store", url).stdout
    assert f"oncekey dlq discard {parcel.id}" in text
    assert "dlq retry" not in text
    assert "keys resolve" not in text


def test_dlq_retry_requeues_a_repeatable_call_within_its_window(shop, url):
    # row 22
    parcel = deferred(shop, repeatable=20 * HOUR)
    said = json.loads(
        oncekey("dlq", "retry", str(parcel.id), "--store", url, "--reason", "back again", "--json").stdout
    )
    assert (said["changed"], said["row"], said["from"], said["to"]) == (True, 22, "unknown", "pending")
    assert "a worker makes the call" in said["retry"]
    assert flows.find(shop, ID).record.state is State.PENDING
    assert oncekey("dlq", "list", "--store", url).stdout == "there are no dead letters\n"
    entries = json.loads(oncekey("keys", "history", KEY, "--scope", SCOPE, "--store", url, "--json").stdout)["items"]
    assert (entries[-1]["trigger"], entries[-1]["why"]) == ("dlq_retry", "back again")


def test_dlq_retry_refuses_a_non_repeatable_call_and_lists_alternatives(shop, url):
    # F39
    parcel = deferred(shop)
    said = refused("dlq", "retry", str(parcel.id), "--store", url, "--reason", "impatient")
    assert "not known to be safe" in said["why"]
    assert {one["row"] for one in said["possible"]} == {19, 22}
    text = oncekey("dlq", "retry", str(parcel.id), "--store", url, "--reason", "impatient")
    assert text.exit_code == 1
    assert f"oncekey dlq discard {parcel.id} --reason '...'" in text.stderr
    assert flows.find(shop, ID).record.state is State.UNKNOWN


def test_keys_show_reports_the_sends_before_a_call_was_declared_not_executed(shop, url):
    deferred(shop)
    call = json.loads(oncekey("keys", "show", KEY, "--store", url, "--json").stdout)["open_call"]
    assert (call["sends"], call["declared_not_executed_at"]) == (1, None)
    done = ("keys", "resolve", KEY, "--store", url, "--not-executed", "--closed", "--reason", "closed there")
    assert oncekey(*done).exit_code == 0
    box = shop.store.outbox
    (held,) = go(shop, box.due("worker", ("charge",), 10, MINUTE))
    taken = go(shop, box.take_up(held, "worker-1", CALL, MINUTE))
    go(shop, box.park(taken.lease, taken.held, Trigger.DEAD_LETTER, DEAD_LETTER, "time-out"))
    again = json.loads(oncekey("keys", "show", KEY, "--store", url, "--json").stdout)["open_call"]
    entries = json.loads(oncekey("keys", "history", KEY, "--store", url, "--json").stdout)["items"]
    (entry,) = (one for one in entries if one["trigger"] == "not_executed")
    assert (again["sends"], again["declared_not_executed_at"]) == (1, entry["at"])
    assert "declared_not_executed_at" in oncekey("keys", "show", KEY, "--store", url, "--verbose").stdout


@pytest.mark.parametrize(("options", "status"), [((), 500), (("--status", "410"), 410)])
def test_dlq_discard_of_a_call_stores_a_response(shop, url, options, status):
    # row 19
    parcel = deferred(shop)
    result = oncekey("dlq", "discard", str(parcel.id), "--store", url, "--reason", "cancelled", *options)
    assert result.exit_code == 0
    assert f"A retry receives the stored response ({status})" in result.stdout
    response = flows.find(shop, ID).record.response
    assert response.status == status
    assert (b"An operator gave up this operation" in response.body) == (not options)
    assert (b'"retryable":false' in response.body) == (not options)
    entries = json.loads(oncekey("keys", "history", KEY, "--scope", SCOPE, "--store", url, "--json").stdout)["items"]
    assert (entries[-1]["trigger"], entries[-1]["to"]) == ("discard", "completed")


@pytest.mark.parametrize("order", ["retry", "discard"])
def test_dlq_retries_or_discards_a_message_without_its_key(shop, url, order):
    parcel = emitted(shop)
    result = oncekey("dlq", order, str(parcel.id), "--store", url, "--reason", "mended", "--json")
    said = json.loads(result.stdout)
    assert (said["changed"], said["letter"]["id"]) == (True, str(parcel.id))
    assert (go(shop, flows.find_parcel(shop.store.outbox, parcel.id)) is not None) == (order == "retry")
    again = oncekey("dlq", order, str(parcel.id), "--store", url, "--reason", "mended")
    assert again.exit_code == 1


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("arguments", [("retry", "--reason", " "), ("discard", "--reason", ""), ("retry",)])
def test_dlq_commands_without_a_reason_change_nothing(shop, url, arguments):
    parcel = emitted(shop)
    result = oncekey("dlq", arguments[0], str(parcel.id), *arguments[1:], "--store", url)
    assert result.exit_code == 2
    assert "--reason" in result.stderr
    assert go(shop, shop.store.outbox.find_dead_letter(parcel.id)) is not None
