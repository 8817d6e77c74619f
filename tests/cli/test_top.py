"""`oncekey top`: one frame for pipes and programs, and a live one in a real terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import psycopg
import pytest
from rich.cells import cell_len

from cli.operating import oncekey
from console.trouble import INLINE_KEY, NASTY, OUTBOX_KEY, PHASED_KEY, fill, opened, put
from harness.postgres import PostgresServer
from harness.terminal import Terminal
from oncekey.cli.top import LISTED, TopData
from oncekey.cli.top_frame import Position, Setting, Sheet, frame
from oncekey.cli.top_screen import Keyboard
from oncekey.core.model import MINUTE, SECOND, DeadLetter, Effects, Parcel, ParcelKind, RecordId, State
from oncekey.core.transitions import Actor, AuditEntry, Mover, Note, Trigger
from oncekey.ops.stats import Count, Roll, Tally, Worker
from operate.rows import a_row

MAIN = (sys.executable, "-c", "from oncekey.cli import main; main()", "top", "--interval", "0.2", "--store")
ESCAPING = "\x1b[2J\x07evil\u202e"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A SQLite file with trouble of every kind, for tests that only look; the world it was made in."""
    url = f"sqlite:///{tmp_path_factory.mktemp('top') / 'shop.db'}"
    with opened(url) as world:
        fill(world, finished=40)
        for name in ("worker-a:211", "worker-b:98"):  # for as long as the tests take
            world.go(world.store.upkeep.beat(name, ["relay"], 3600 * SECOND))
        yield url, world


@pytest.fixture
def top(filled):
    """Starts it in a terminal, and sees the first frame."""
    running = []

    def starting(*options, url=filled[0], **window):
        terminal = Terminal(*MAIN, url, *options, **window)
        running.append(terminal)
        terminal.__enter__()
        terminal.until("An operator has to look" if url == filled[0] else "worker")
        return terminal

    yield starting
    for terminal in running:
        terminal.__exit__()


# One frame


def test_one_frame_says_what_the_consoles_overview_says(url):
    with opened(url) as world:
        fill(world, finished=40)

    message = oncekey("top", "--store", url, "--once").stdout

    assert "An operator has to look: 3 of unknown outcome and 4 dead letters." in message
    assert "PostgreSQL 1" in message if url.startswith("postgresql") else "SQLite 3." in message
    assert message.index(PHASED_KEY) < message.index(INLINE_KEY) < message.index(OUTBOX_KEY)  # the oldest first
    assert "a call to the outside got no answer" in message
    assert "worker-a:211  alive" in message
    assert "relay, sweeper, reaper, reconciler" in message
    assert "the provider answered 503" in message
    assert "half within" in message
    assert "\x1b" not in message


def test_a_program_gets_an_envelope_per_frame(url):
    with opened(url) as world:
        fill(world, finished=40)

    lines = oncekey("top", "--store", url, "--json", "--count", "2", "--interval", "0.1").stdout.splitlines()

    shapes = [json.loads(line) for line in lines]
    assert len(shapes) == 2
    assert list(shapes[0])[:3] == ["now", "items", "next"]
    assert [one["what"] for one in shapes[0]["items"]] == ["unknown"] * 3 + ["dead_letter"] * 4
    assert [one["key"] for one in shapes[0]["items"][:3]] == [PHASED_KEY, INLINE_KEY, OUTBOX_KEY]
    # What another command says of the same, as far as it says it.
    for one in json.loads(oncekey("unknown", "list", "--store", url, "--json").stdout)["items"]:
        assert {"what": "unknown", **one} in shapes[1]["items"]
    letters = json.loads(oncekey("dlq", "list", "--store", url, "--json").stdout)["items"]
    assert [{"what": "dead_letter", **one} for one in letters] == shapes[1]["items"][3:]
    counts = {what: one["count"] for what, one in shapes[1]["counts"].items()}
    assert counts == {
        "unknown": 3, "dead": 4, "stuck": 1, "failed_retryable": 7, "in_progress": 2, "pending": 1, "due": 0,
    }  # fmt: skip
    assert shapes[1]["ended"]["failed_for_good"] == 2
    assert shapes[1]["level"] == "wait"
    assert [one["alive"] for one in shapes[1]["workers"]] == [True, True]
    assert {one["trigger"] for one in shapes[1]["audit"]} == {"still_unknown"}


def test_a_user_who_may_only_read_is_enough(operated_dsn):
    with psycopg.connect(operated_dsn, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS oncekey_reader")
        connection.execute("CREATE ROLE oncekey_reader LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA oncekey TO oncekey_reader")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA oncekey TO oncekey_reader")
        connection.execute("ALTER ROLE oncekey_reader SET default_transaction_read_only = on")
    try:
        result = oncekey(
            "top",
            "--once",
            "--json",
            "--store",
            f"{operated_dsn}{'&' if '?' in operated_dsn else '?'}user=oncekey_reader",
        )
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["server"].startswith("PostgreSQL ")
    finally:
        with psycopg.connect(operated_dsn, autocommit=True) as connection:
            connection.execute("DROP OWNED BY oncekey_reader")
            connection.execute("DROP ROLE oncekey_reader")


def test_without_a_store_one_frame_is_a_mistake(tmp_path):
    missing = oncekey("top", "--store", f"sqlite:///{tmp_path / 'none.db'}", "--once")
    nobody = oncekey("top", "--store", "postgresql://nobody@127.0.0.1:1/none", "--once")

    assert (missing.exit_code, nobody.exit_code) == (2, 2)
    assert "there is no file" in missing.stderr
    assert not (tmp_path / "none.db").exists()


def test_a_pipe_gets_one_frame_and_may_be_closed(filled):
    url, _ = filled
    command = [*MAIN, url]

    whole = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as endless:
        assert json.loads(endless.stdout.readline())["next"] is None
        endless.stdout.close()
        complaint = endless.stderr.read()
        code = endless.wait(60)

    assert whole.count("Unknown outcomes and dead letters") == 1
    assert (code, complaint) == (0, "")


# Live


def assert_whole(terminal):
    """The terminal is as it was before."""
    assert not terminal.screen.alternate
    assert terminal.screen.cursor
    assert terminal.settings == terminal.before


def test_a_person_goes_through_it_by_keys(top):
    terminal = top()
    shown = terminal.until("▸ Unknown outcomes", "q quit")
    assert len(shown.splitlines()) == 24
    assert terminal.screen.alternate
    assert terminal.settings != terminal.before
    terminal.press("\t")
    terminal.until("▸ Workers")
    terminal.press("\r")
    terminal.until("▸ Worker worker-a:211", "is seen every")
    terminal.press("\x1b")
    terminal.until("▸ Workers", gone=["is seen every"])
    terminal.press("\x1b[C")
    terminal.until("▸ Audit")
    terminal.press("\r")
    terminal.until("A line of the audit", "oncekey keys list --digest")
    terminal.press("\x1b")
    terminal.until("▸ Audit")
    terminal.press("\t")
    terminal.until("▸ Unknown outcomes")
    terminal.press("\x1b[B\r")
    terminal.until(f"▸ Key {INLINE_KEY}", "What to do", f"oncekey keys resolve {INLINE_KEY} --tenant acme")
    terminal.press("\x1b")
    terminal.until("▸ Unknown outcomes")
    terminal.press("\x1b[F\r")
    terminal.until("▸ Dead letter", "oncekey dlq retry")
    terminal.press("\x1b?")
    terminal.until("▸ Keys", "find a key by its name")
    terminal.press("\x1b/order-2026-11-000\r")
    terminal.until("10 keys begin with order-2026-11-000")
    terminal.press("\x1b[B\r")
    terminal.until("▸ Key order-2026-11-0001", "Done: it succeeded")
    terminal.press("/nobody-has-this-one\r")
    terminal.until("There is no such key here")
    terminal.press("\x1b+")
    terminal.until("every 0.5 s")
    terminal.press("p")
    terminal.until("paused")
    terminal.press("q")

    assert terminal.ended() == 0
    assert_whole(terminal)
    assert "32" in {part for style in terminal.screen.styles for part in style.split(";")}  # green


def test_what_happens_is_shown_by_itself(top, tmp_path):
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with opened(url) as world:
        terminal = top(url=url)
        assert "No worker lives" in terminal.text
        world.go(world.store.upkeep.beat("worker-z:7", ["relay"], 60 * SECOND))
        terminal.until("Nothing waits for a person.", "worker-z:7")
        put(world, State.UNKNOWN, Effects.INLINE, "a-new-doubt", last_error="handler_raised")
        terminal.until("An operator has to look: 1 of unknown outcome.", "a-new-doubt")
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.ended() == 128 + signal.SIGHUP
        assert_whole(terminal)


def test_it_takes_the_size_of_its_window_and_leaves_colours_out_where_they_are_not_wanted(top):
    terminal = top(columns=160, lines=50, environment={"NO_COLOR": "1"})
    wide = terminal.until("Audit, the newest first", "q quit")  # its last line, so that it is drawn whole
    assert len(wide.splitlines()) == 50
    assert any("Unknown outcomes" in line and "Workers" in line for line in wide.splitlines())
    terminal.resize(60, 14)
    terminal.until("▸ Unknown outcomes", "q quit")
    terminal.press("\t\t")
    terminal.until("▸ Audit, the newest first", "resolver worker-a:211", gone=["Unknown outcomes"])
    terminal.resize(30, 8)
    terminal.until("40 columns and 12 lines are n")
    terminal.resize(80, 24)
    terminal.until("Unknown outcomes", "Audit, the newest first", "? help")
    terminal.process.send_signal(signal.SIGTERM)

    assert terminal.ended() == 128 + signal.SIGTERM
    assert_whole(terminal)
    codes = {int(part) for style in terminal.screen.styles for part in style.split(";") if part}
    assert codes <= {0, 1, 2, 7}  # bold, dim and reverse are no colours


def test_the_terminal_is_whole_after_a_fault_of_ours(filled):
    broken = (
        "from oncekey.cli import main, top_screen\n"
        "def fault(*_): raise RuntimeError('a fault')\n"
        "top_screen.read_top = fault\n"
        "main()"
    )
    with Terminal(sys.executable, "-c", broken, "top", "--store", filled[0]) as terminal:
        assert terminal.ended() == 1
        assert "RuntimeError: a fault" in terminal.sent.rpartition("\x1b[?1049l")[2]
        assert_whole(terminal)


def test_it_can_be_stopped_and_gone_on_with(top):
    terminal = top()
    terminal.press("\x1a")
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
    terminal._wait(lambda: not terminal.screen.alternate)
    assert_whole(terminal)

    terminal.process.send_signal(signal.SIGCONT)
    terminal.until("An operator has to look", "q quit")
    assert terminal.screen.alternate
    terminal.press("\x03")
    assert terminal.ended() == 0
    assert_whole(terminal)


def test_a_store_that_goes_away_is_asked_again_until_it_is_back():
    with PostgresServer() as server:
        url = server.create_database("shop")
        with opened(url) as world:
            world.go(world.store.upkeep.beat("worker-z:7", ["relay"], 3600 * SECOND))
        with Terminal(*MAIN, url) as terminal:
            terminal.until("Nothing waits for a person.", "PostgreSQL 1")
            server.stop()
            terminal.until("The store does not answer", "Trying again", "worker-z:7")
            terminal.press("\t\r")
            terminal.until("▸ Worker worker-z:7")
            server.start()
            terminal.until("Nothing waits for a person.", gone=["The store does not answer"])
            terminal.press("q")
            assert terminal.ended() == 0


# What is drawn


def drawn(seen, width=80, height=24, place=None, **changes):
    setting = Setting("sqlite:///shop.db", "SQLite 3.50", datetime.fromtimestamp(0, UTC), **changes)
    return [line.plain for line in frame(seen, setting, place or Position(), width, height)]


def seen_with(*unknown, letters=(), workers=(), audit=(), found=None):
    tally = Tally(10**15, {"unknown": Count(len(unknown) if found is None else found, 10**15 - MINUTE)})
    return TopData(tally, Roll(10**15, workers), (), unknown, letters, audit)


def hostile():
    record = a_row(
        State.UNKNOWN, Effects.INLINE, id=RecordId("1:-9:" + ESCAPING, ESCAPING + NASTY), last_error=ESCAPING
    )
    parcel = Parcel(record.incarnation, ParcelKind.EMIT, record.id, record.incarnation, ESCAPING, "{}", "dk")
    note = Note.of(record, None, Trigger.SWEEP, Mover(Actor.OPERATOR, ESCAPING), ESCAPING)
    return seen_with(
        record,
        letters=(DeadLetter(parcel, 1, 0, 0, None, ESCAPING),),
        workers=(Worker(ESCAPING, (ESCAPING,), 0, 0, SECOND),),
        audit=(AuditEntry(0, note),),
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (119, 30), (120, 34), (300, 100)])
@pytest.mark.parametrize("place", [Position(), Position(sheet=Sheet(ESCAPING, (ESCAPING, "word " * 100)))])
def test_a_frame_fits_its_window_whatever_clients_wrote(width, height, place):
    lines = drawn(hostile(), width, height, place, trouble=ESCAPING)

    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width
    assert all(letter.isprintable() for line in lines for letter in line)
    assert width < 80 or "evil" in "".join(lines)


def test_many_unknown_ones_are_said_to_be_more():
    records = [
        a_row(State.UNKNOWN, Effects.INLINE, id=RecordId("s", f"key-{n}"), last_error="x") for n in range(LISTED)
    ]

    assert any("Unknown (the newest 200 of 4,321)" in line for line in drawn(seen_with(*records, found=4321)))


def test_the_chosen_line_stays_in_sight():
    records = [a_row(State.UNKNOWN, Effects.INLINE, id=RecordId("s", f"key-{n:03}"), last_error="x") for n in range(99)]
    place = Position()
    place.rows[place.panel] = 57

    text = "\n".join(drawn(seen_with(*records), place=place))

    assert "key-057" in text
    assert "key-058" not in text


def test_times_are_in_utc_and_in_the_readers_zone():
    at = datetime.fromtimestamp(1_794_850_000, timezone(timedelta(hours=1), "CET"))
    setting = Setting("sqlite:///shop.db", "", at)

    lines = [line.plain for line in frame(None, setting, Position(), 120, None)]

    assert "2026-11-16 17:26:40 UTC, 18:26:40 CET" in lines[0]


def test_keys_come_in_pieces():
    keyboard = Keyboard()

    assert keyboard.feed(b"a\x1b") == ["a"]
    assert keyboard.waits
    assert keyboard.feed(b"[") == []
    assert keyboard.feed(b"B\xc3") == ["\x1b[B"]
    assert keyboard.feed(b"\xa4\x1bx\x1b[5~") == ["ä", "\x1b", "x", "\x1b[5~"]
    assert keyboard.feed(b"\x1b") == []
    assert keyboard.give_up() == ["\x1b"]
    assert not keyboard.waits
    assert keyboard.give_up() == []
