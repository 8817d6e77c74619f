"""The programs of the guides to functions and to consumers do what their pages say; Celery has a test of its own."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.pages import ROOT, Page, load
from oncekey import Handling, Receipt

CONSUMERS = Page(ROOT / "docs/howto/functions.md").blocks("python")
BUSY, DEAD = Receipt(Handling.BUSY, retry_after=0), Receipt(Handling.DEAD, reason="refused")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_functions_guide_payments_work_as_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [one for one in Page(ROOT / "docs/howto/functions.md").blocks("python") if one.file == "payments.py"]
    with closing(sqlite3.connect("payments.db")) as connection:
        connection.execute("CREATE TABLE payments (id INTEGER PRIMARY KEY, customer TEXT, amount TEXT)")
    page: Any = load(block.text, "payments.py", folder, monkeypatch)
    calls = re.findall(r"`(book\(.*?\))`", Page(ROOT / "docs/howto/functions.md").text)
    assert [eval(call, vars(page)) for call in calls] == [page.Payment(1)] * 2
    with pytest.raises(page.KeyReusedError):
        page.book(customer="ann", number="7", amount=0)
    with pytest.raises(page.KeyReusedError):
        page.book("7", "bob")
    small, large = page.Invoice("7", "ann", Decimal("9.90")), page.Invoice("8", "ann", Decimal(2000))
    assert page.settle(small) == page.settle(small) == page.pay(small).charge
    assert page.settle(page.Invoice("7", "bob", Decimal("9.90"))) == "this number belongs to another invoice"
    assert page.settle(large) == page.settle(large) == "refused: over the limit"
    with closing(sqlite3.connect("payments.db")) as connection:
        assert connection.execute("SELECT customer, amount FROM payments").fetchall() == [("ann", "0"), ("ann", "9.90")]
    page.once.blocking().close()


@pytest.fixture
def take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with closing(sqlite3.connect("shop.db")) as connection, connection:
        connection.execute("CREATE TABLE stock (product TEXT, amount INTEGER)")
        connection.execute("INSERT INTO stock VALUES ('tea', 10)")
    (block,) = [one for one in CONSUMERS if one.file == "inbox.py"]
    page: Any = load(block.text, "inbox.py", folder, monkeypatch)
    yield page.take_from_stock
    page.once.blocking().close()


def amount() -> int:
    with closing(sqlite3.connect("shop.db")) as connection:
        ((left,),) = connection.execute("SELECT amount FROM stock").fetchall()
    return int(left)


def shape(function: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    (block,) = [one for one in CONSUMERS if f"\ndef {function}(" in one.text]
    found: Callable[..., Any] = getattr(load(block.text, f"{function}.py", folder, monkeypatch), function)
    return found


class CallReport:
    """A client library that notes what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.said.append((name, *args, *kwargs.values()))


EVENT = json.dumps({"product": "tea"})


def test_rabbitmq_consumer_of_the_guide_acks_nacks_and_rejects(
    take: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_delivery, channel = shape("on_delivery", folder, monkeypatch), CallReport()
    method, properties = SimpleNamespace(delivery_tag=7), SimpleNamespace(message_id="m-1")
    for receiver in (take, take, lambda *_: BUSY, lambda *_: DEAD):
        on_delivery(receiver, channel, method, properties, EVENT.encode())
    assert channel.said == [("basic_ack", 7)] * 2 + [("basic_nack", 7, True), ("basic_reject", 7, False)]
    assert amount() == 9


def test_kafka_consumer_of_the_guide_commits_each_record(
    take: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_record, consumer = shape("on_record", folder, monkeypatch), CallReport()
    parts = {"topic": "sold", "partition": 0, "offset": 42, "value": EVENT.encode()}
    record = SimpleNamespace(**{name: (lambda part=part: part) for name, part in parts.items()})
    buried: list[Any] = []
    waits = [BUSY, Receipt(Handling.DUPLICATE)]
    for receiver in (take, take, lambda *_: waits.pop(0), lambda *_: DEAD):
        on_record(receiver, consumer, record, lambda one, why: buried.append((one, why)))
    assert consumer.said == [("commit", record, False)] * 4
    assert (buried, waits, amount()) == ([(record, "refused")], [], 9)


def test_sqs_consumer_of_the_guide_deletes_handled_messages(
    take: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_received, sqs = shape("on_received", folder, monkeypatch), CallReport()
    message = {"MessageId": "m-1", "Body": EVENT, "ReceiptHandle": "r-1"}
    for receiver in (take, take, lambda *_: BUSY, lambda *_: DEAD):
        on_received(receiver, sqs, "queue", message, "dead")
    done = ("delete_message", "queue", "r-1")
    busy = ("change_message_visibility", "queue", "r-1", 0)
    assert sqs.said == [done, done, busy, ("send_message", "dead", EVENT), done]
    assert amount() == 9


def test_webhook_receiver_of_the_guide_returns_the_shown_statuses(
    take: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_webhook = shape("on_webhook", folder, monkeypatch)
    body = json.dumps({"id": "evt_1", "data": {"product": "tea"}}).encode()
    answers = [on_webhook(one, body) for one in (take, take, lambda *_: BUSY, lambda *_: DEAD)]
    assert answers == [(200, {}), (200, {}), (503, {"Retry-After": "0"}), (200, {})]
    assert amount() == 9
