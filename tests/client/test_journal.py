"""The journal: on disk before anything leaves, shared by processes, and without anybody's credentials."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from oncekey_client.attempts import Answered, KeyedCall, Misused, RetrySession, Unknown, Unsettled
from oncekey_client.exchange import (
    Call,
    Failure,
    JournalError,
    Loss,
    PersonalKeyWarning,
    Reply,
    RequestKeyExpiredError,
    RequestKeyReusedError,
    RequestOutcomeUnknownError,
)
from oncekey_client.journal import Journal, Progress

SECRET = "Bearer s3cr3t-token"
CALL = Call(
    "POST",
    "http://ann:hunter2@shop.example/orders",
    (("Authorization", SECRET), ("Cookie", SECRET), ("X-Api-Key", SECRET), ("Content-Type", "application/json")),
    b'{"a": 1}',
)
DONE = Reply(
    201, (("Location", "/orders/1"), ("Set-Cookie", "s=1"), ("Content-Type", "application/json")), b'{"id": 1}'
)
KEY = "k" * 16


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal.db")


def begin(journal, call=CALL, key=KEY, name=None):
    return journal.begin(call, key, name=name, profile="ietf")


def test_journal_entry_is_open_until_its_response_is_stored(journal):
    # R218 in part, R225
    begin(journal, name="invoice-7")
    (entry,) = journal.unfinished()
    assert (entry.key, entry.name, entry.progress, entry.call.body) == (KEY, "invoice-7", Progress.OPEN, CALL.body)
    journal.answer(KEY, DONE)
    assert journal.unfinished() == []
    answered = journal.named("invoice-7")
    assert answered == journal.entry(KEY)
    assert answered is not None
    assert (answered.progress, answered.call.body) == (Progress.ANSWERED, b"")
    assert answered.reply == Reply(201, (("Location", "/orders/1"), ("Content-Type", "application/json")), b'{"id": 1}')


def test_journal_stores_no_credentials_and_is_private_to_its_owner(journal):
    begin(journal)
    content = b"".join(path.read_bytes() for path in journal.path.parent.iterdir())
    assert b"s3cr3t" not in content
    assert b"hunter2" not in content
    assert journal.unfinished()[0].call.headers == (("Content-Type", "application/json"),)
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600


def test_journal_stores_headers_listed_in_keep_fields(tmp_path):
    journal = Journal(tmp_path / "journal.db", keep_fields=["X-Tenant"])
    begin(journal, CALL.with_field("X-Tenant", "acme"))
    assert journal.unfinished()[0].call.field("x-tenant") == "acme"


def test_the_same_name_or_key_is_the_same_operation(journal):
    first = begin(journal, name="invoice-7")
    assert begin(journal, key="another-key-16chr", name="invoice-7") == first
    assert begin(journal) == first
    assert len(journal.entries()) == 1


@pytest.mark.parametrize("other", [Call("POST", CALL.url, (), b"{}"), Call("PUT", CALL.url, (), CALL.body)])
def test_journal_rejects_a_different_request_with_a_used_name_or_key(journal, other):
    # R224
    begin(journal, name="invoice-7")
    with pytest.raises(RequestKeyReusedError):
        begin(journal, other)
    with pytest.raises(RequestKeyReusedError):
        begin(journal, other, key="another-key-16chr", name="invoice-7")


def test_journal_never_overwrites_a_stored_response(journal):
    begin(journal)
    journal.mark_unknown(KEY, "why")
    assert journal.entries()[0].progress is Progress.UNKNOWN
    journal.answer(KEY, DONE)
    journal.mark_unknown(KEY, "late")
    journal.answer(KEY, Reply(500))
    (entry,) = journal.entries()
    assert (entry.progress, entry.note, entry.reply and entry.reply.status) == (Progress.ANSWERED, "", 201)


def test_journal_prunes_finished_entries_by_age_and_forgets_by_key(tmp_path):
    now = [1000.0]
    journal = Journal(tmp_path / "journal.db", clock=lambda: now[0])
    begin(journal, key="a" * 16)
    begin(journal, Call("POST", "http://shop.example/b"), key="b" * 16)
    journal.answer("a" * 16, DONE)
    now[0] = 2000.0
    assert journal.prune(1001.0) == 0
    assert journal.prune(999.0) == 1
    assert [entry.key for entry in journal.entries()] == ["b" * 16]
    journal.forget("b" * 16)
    assert journal.entries() == []


def test_unwritable_journal_raises_a_journal_error(tmp_path):
    with pytest.raises(JournalError, match=r"missing|journal\.db"):
        begin(Journal(tmp_path / "missing" / "journal.db"))
    (tmp_path / "text.db").write_text("this is not a database, and long enough to be seen as none")
    with pytest.raises(JournalError, match=r"text\.db cannot be used"):
        begin(Journal(tmp_path / "text.db"))


def test_journal_uses_full_synchronous_mode(journal, monkeypatch):
    begin(journal)
    with closing(journal._connect()) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "truncate"


def test_opening_the_journal_leaves_the_locks_of_other_threads_alone(journal):
    """To close any handle of a file drops the locks that this process has on it, by the rules of POSIX."""
    begin(journal)
    other = [sys.executable, "-c", LOCKED, str(journal.path)]
    with closing(journal._connect()) as connection:
        connection.execute("BEGIN IMMEDIATE")
        journal._connect().close()
        assert subprocess.run(other, capture_output=True, text=True, check=True).stdout.strip() == "database is locked"


LOCKED = """
import sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error)
"""

PROGRAM = """
import sys
from oncekey_client.exchange import Call, Reply
from oncekey_client.journal import Journal
journal = Journal(sys.argv[1])
for n in range(20):
    key = f"key-of-process-{sys.argv[2]}-{n}"
    journal.begin(Call("POST", "http://shop.example/", (), b"{}"), key, name=None, profile="ietf")
    journal.answer(key, Reply(201))
"""


def test_processes_and_threads_write_at_the_same_time(journal):
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(journal.path), str(n)]) for n in range(3)]
    threads = [threading.Thread(target=begin, args=(journal, CALL, f"thread-key-{n:06}")) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    standings = [entry.progress for entry in journal.entries()]
    assert (standings.count(Progress.ANSWERED), standings.count(Progress.OPEN)) == (60, 10)


# The desk


def test_session_stores_the_key_in_the_journal_before_sending(journal):
    # R217, R225
    made = iter(["first-key-of-all", "second-key-of-all"])
    begun = RetrySession(journal=journal, new_key=lambda: next(made)).begin(
        CALL.with_field("Oncekey-Operation", "invoice-7")
    )
    assert isinstance(begun, KeyedCall)
    assert begun.key == "first-key-of-all"
    assert begun.call == CALL.with_field("Idempotency-Key", '"first-key-of-all"')
    assert journal.unfinished()[0].key == begun.key


def test_restarted_program_gets_its_key_or_response_from_the_journal(journal):
    # R225
    named = CALL.with_field("Oncekey-Operation", "invoice-7")
    first = RetrySession(journal=journal).begin(named)
    assert isinstance(first, KeyedCall)
    assert RetrySession(journal=journal).begin(named) == first
    RetrySession(journal=journal).conclude(first, Answered(DONE))
    again = RetrySession(journal=journal).begin(named)
    assert isinstance(again, Reply)
    assert (again.status, again.body) == (DONE.status, DONE.body)


def test_session_uses_the_given_key_and_warns_if_it_looks_personal():
    # R226
    assert RetrySession().begin(CALL.with_field("Idempotency-Key", KEY)) == KeyedCall(
        KEY, CALL.with_field("Idempotency-Key", KEY)
    )
    with pytest.warns(PersonalKeyWarning) as warned:
        RetrySession().begin(CALL.with_field("Idempotency-Key", "order-of-ann@example.com"))
    assert "ann@" not in str(warned[0].message)


def test_session_does_not_send_a_key_older_than_max_age(tmp_path):
    # R223
    now = [0.0]
    session = RetrySession(journal=Journal(tmp_path / "journal.db", clock=lambda: now[0]), max_age=3600.0)
    named = CALL.with_field("Oncekey-Operation", "invoice-7")
    session.begin(named)
    now[0] = 3599.0
    assert isinstance(session.begin(named), KeyedCall)
    now[0] = 3601.0
    with pytest.raises(RequestKeyExpiredError):
        session.begin(named)
    assert session.journal is not None
    (entry,) = session.journal.unfinished()
    assert (entry.progress, entry.note) == (Progress.UNKNOWN, "its key is older than servers store keys")


def test_session_journals_every_outcome_and_returns_or_raises_it(journal):
    session = RetrySession(journal=journal)
    failure = Failure(Loss.LOST, OSError("reset"))

    def ended(outcome, key):
        operation = KeyedCall(key, CALL)
        begin(journal, key=key)
        try:
            return session.conclude(operation, outcome)
        finally:
            entry = journal.entry(key)
            assert entry is not None
            standings.append(entry.progress)

    standings = []
    assert ended(Answered(DONE), "a" * 16) == DONE
    assert ended(Unsettled(failure), "b" * 16) == failure
    with pytest.raises(RequestOutcomeUnknownError, match="may have happened: silence") as unknown:
        ended(Unknown("silence", failure), "c" * 16)
    assert (unknown.value.key, unknown.value.call, unknown.value.__cause__) == ("c" * 16, CALL, failure.error)
    with pytest.raises(RequestKeyExpiredError) as expired:
        ended(Unknown("forgotten", Reply(410), expired=True), "d" * 16)
    assert expired.value.reply == Reply(410)
    with pytest.raises(RequestKeyReusedError):
        ended(Misused(Reply(422)), "e" * 16)
    answered, still_open, doubt = Progress.ANSWERED, Progress.OPEN, Progress.UNKNOWN
    assert standings == [answered, still_open, doubt, doubt, answered]


def test_no_error_shows_credentials():
    error = RequestOutcomeUnknownError("it may have happened", call=CALL, key=KEY)
    shown = repr(error) + str(error) + repr(error.call)
    assert "s3cr3t" not in shown
    assert "hunter2" not in shown
