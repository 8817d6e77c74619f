"""The bench runs, leaves nothing behind, and says what it says from what it measured."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from bench.counting import Relay
from bench.figures import BenchError, Figures, Slice, by_cpu, by_rate
from bench.load import Load, Volley, fire
from bench.page import doublings, page, steps
from bench.results import tables
from bench.serving import Serving, Stores
from bench.summary import KEPT, between_markers, kept, readme, sizing
from bench.variants import VARIANTS, By, Chosen, Place, Ratio, Sends, Store, Variant, chosen, named, without

from bench import clocks, results, rounds, startup, summary
from harness.processes import children, is_alive

ROOT = Path(__file__).parents[2]
SHORT = ("--rounds", "1", "--turns", "1", "--requests", "20", "--connections", "2", "--without-peers")


def _bench(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench", *words]


def test_a_short_run_writes_figures_and_a_page(tmp_path: Path) -> None:
    # No minute is left after the first round, so that the second one does not begin.
    words = ("--rounds", "2", "--minutes", "0", "--only", "local,sqlite-replay", "--out", str(tmp_path))
    command = _bench(*SHORT, *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "results.json").read_text())
    assert said["settings"]["rounds"] == 1
    measured = said["variants"]
    assert {"stock", "local", "unkeyed", "sqlite-replay"} <= set(measured)
    for one in measured.values():
        assert [found["requests"] for found in one["rounds"]] == [20]
        assert one["rate"]["low"] > 0
    assert measured["local"]["counts"]["messages"] == 3
    assert measured["local"]["counts"]["transactions"] == 1
    assert measured["sqlite-replay"]["counts"] is None
    if sys.platform == "linux":
        assert measured["local"]["store_us"]["low"] > 0
        assert measured["sqlite-replay"]["store_us"]["high"] == 0
        assert said["ratios"]["local/stock"]["cpu"]["low"] > 0
    assert "LOCAL new key / unprotected write" in done.stdout
    assert str(ROOT) not in json.dumps(said)
    assert "<svg" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_server_behind(tmp_path: Path, sign: signal.Signals) -> None:
    command = _bench(*SHORT, "--only", "passing", "--rounds", "1000", "--out", str(tmp_path))
    bench = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert bench.stderr is not None
    for line in bench.stderr:
        if "round 1 of" in line:
            break
    started = children(bench.pid)
    assert len(started) >= 3, "PostgreSQL and two servers"
    bench.send_signal(sign)
    bench.communicate(timeout=60)
    assert bench.returncode != 0
    ends = time.monotonic() + 60
    while any(is_alive(pid) for pid in started):
        assert time.monotonic() < ends, "a process is left"
        time.sleep(0.05)
    assert not (tmp_path / "results.json").exists()


def test_a_server_ends_with_the_bench_that_started_it() -> None:
    command = [sys.executable, str(ROOT / "bench" / "served"), "bare"]
    served = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    assert int(served.stdout.readline()) > 0
    served.communicate(timeout=60)  # closes its standard input, as the end of the bench does
    assert served.returncode == 1


def _figures(rate: float, cpu: float | None = 100.0) -> Figures:
    return Figures(100, rate, 100 / rate, 200 / rate, cpu, None if cpu is None else 0.0, 0.5)


def test_figures_combine_all_slices_of_a_round() -> None:
    slices = [Slice(1.0, [0.001, 0.003], 0.002, 0.001, 1.0), Slice(1.0, [0.002, 0.002], 0.004, 0.001, 0.0)]
    found = Figures.of(slices)
    assert (found.requests, found.rate, found.p50_ms, found.p99_ms) == (4, 2.0, 2.0, 3.0)
    assert found.server_us == pytest.approx(1500)
    assert found.cpu_us == pytest.approx(2000)
    assert found.foreign_cores == 0.5
    assert Figures.of([Slice(1.0, [0.1], None, None, None)]).cpu_us is None
    with pytest.raises(BenchError):
        Figures.of([Slice(1.0, [], 0.0, 0.0, None)])


def test_bench_ratios_compare_figures_of_the_same_round() -> None:
    base = [_figures(100, 10), _figures(1000, 20)]
    ours = [_figures(50, 40), _figures(600, 20)]
    assert by_rate(ours, base) == [0.5, 0.6]
    assert by_cpu(ours, base) == [0.25, 1.0]
    assert by_cpu([_figures(1, None)], [_figures(1)]) is None


_RATE = {"median": 20_000.0, "low": 18_000.0, "high": 21_000.0, "rounds": [20_000.0, 18_000.0, 21_000.0]}
_WAITS = {"count": 900, "p50": 5.0, "p99": 10.0, "worst": 20.0}
_WORKERS = {
    "drain": {"settings": {"rounds": 3}, "queues": {"oncekey asyncpg": {"rate": _RATE, "cpu_us": None}}},
    "reap": {
        "rows": 1000,
        "moved": 1000,
        "seconds": 0.04,
        "rows_per_s": 25_000,
        "million_s": 40.0,
        "batch_ms": _WAITS,
        "load_alone_ms": _WAITS,
        "load_beside_ms": {**_WAITS, "p99": 12.0},
        "p99_ratio": 1.2,
        "p99_ratios": {"median": 1.25, "low": 1.1, "high": 1.4, "rounds": [1.1, 1.25, 1.4]},
        "p99_noise": {"median": 1.0, "low": 0.9, "high": 1.1},
        "costs": {"no audit": {"wal_bytes_per_row": 500, "cpu_us_per_row": 3.0}},
    },
}


def _document(rates: dict[str, list[float]]) -> dict[str, Any]:
    variants = tuple(Variant(name, f"the {name} <request>", "local", "here") for name in rates)
    ratios = (Ratio("local/stock", "local / stock", "local", "stock", By.CPU),)
    measured = rounds.Measured(
        Chosen((Place("here", "asyncpg"),), variants, ratios),
        {name: [_figures(rate, 1000 / rate) for rate in found] for name, found in rates.items()},
        {},
        {"cached": "there is <none>"},
    )
    machine = {"cores": 2, "processor": "a & b", "system": "s", "python": "3", "postgresql": "15", "packages": {}}
    return results.document(
        measured, rounds.Plan(), machine | {"load_before": 0}, {"now": "a" * 40, "changed": False}, {}, workers=_WORKERS
    )


def test_tables_show_medians_and_ranges() -> None:
    document = _document({"stock": [100, 100, 100], "local": [50, 60, 80]})
    assert "0.60 (0.50-0.80)*" in tables(document)
    assert "missing: cached: there is <none>" in tables(document)
    assert document["machine"]["cpu_spread"] == pytest.approx(0.225)  # the median of nought and 7.5 of 16.7


def test_summary_contains_only_measured_figures() -> None:
    document = _document({"stock": [100, 100, 100], "local": [50, 60, 80]})
    said = summary.table(document)
    figures = [figure for _, figure in summary.lines(document)]
    added = ["667 (250-1000) us", "1333 (500-2000) us"]
    assert figures == ["60 (50-80)", "0.60 (0.50-0.80)", *added, "20000 (18000-21000)", "40 s", "1.20 (1.10-1.40)"]
    assert said.splitlines()[2].endswith(" 0.60 (0.50-0.80)  0.70 or more")
    for figure in figures:
        assert figure in said
        assert f" | {figure} |" in sizing(document)
        assert f"<td>{figure}</td>" in page(document)


def test_summary_inverts_the_cost_ratio_to_an_older_commit() -> None:
    document = _document({"stock": [100], "local": [50]})
    document["ratios"]["inline/before"] = {"cpu": {"median": 2.0, "low": 1.25, "high": 4.0}}
    assert "0.50 (0.25-0.80)" in summary.table(document)
    assert "INLINE" not in sizing(document), "comparisons with older commits are not published"


def test_stored_results_are_small_and_produce_the_same_sizing_table() -> None:
    document = _document({"stock": [100] * 50, "local": [50] * 50})
    assert sizing(kept(document)) == sizing(document)
    assert len(json.dumps(kept(document))) < 6000


def test_a_guide_publishes_request_rates_and_the_command_that_measures_them() -> None:
    # R76 in part
    guide = (ROOT / "docs/howto/sizing.md").read_text()
    rates = re.findall(r"^\| (\S+) .*per second, one server process \| (\d+) ", guide, re.MULTILINE)
    assert [words for words, rate in rates if int(rate)] == ["`LOCAL`", "Replays"]
    (words,) = re.findall(r"`python -m bench (--only [^`]+)`", guide)
    assert set(words.split()[1].split(",")) == set(summary.ABSOLUTE)


@pytest.mark.parametrize("page", summary.PUBLISHED)
def test_published_page_contains_the_stored_figures(page: str) -> None:
    figures = summary.PUBLISHED[page](json.loads(KEPT.read_text()))
    assert between_markers((ROOT / page).read_text()) == figures


def test_the_readme_has_four_of_the_figures() -> None:
    rows = [row for row in readme(json.loads(KEPT.read_text())).splitlines() if row.startswith("| ")][2:]
    assert len(rows) == 4
    assert set(rows) < set(sizing(json.loads(KEPT.read_text())).splitlines())


def test_readme_figures_are_read_between_their_markers() -> None:
    figures = readme(_document({"stock": [100], "local": [50]}))
    assert between_markers(f"# A\n\n{figures}\n\nmore") == figures
    with pytest.raises(BenchError, match="no figures"):
        between_markers("# A page without figures")


def test_bench_page_loads_no_external_resources_and_escapes_html() -> None:
    said = page(_document({"stock": [100, 110], "local": [50, 60]}))
    assert "://" not in said
    assert "src=" not in said
    assert "<script" not in said
    assert "there is &lt;none&gt;" in said
    assert "a &amp; b" in said
    assert said.count("<li><span") == 1 + 1 + 2 + 2  # a ratio, a queue, two costs, two waits


def test_chart_scales_cover_all_plotted_values() -> None:
    assert doublings([0.3, 5.0]) == [0.25, 0.5, 1, 2, 4, 8]
    assert doublings([1.0]) == [0.5, 1, 2]
    for highest in (1, 7, 99, 1234, 99_999):
        ticks = steps(highest)
        assert ticks[0] == 0
        assert ticks[-1] >= highest
        assert 3 <= len(ticks) <= 7


def test_selecting_a_variant_also_selects_its_comparison_baseline() -> None:
    replay = chosen(["replay-elsewhere"])
    assert {variant.name for variant in replay.variants} == {"bare", "local", "replay-elsewhere"}
    assert [ratio.name for ratio in replay.ratios] == ["replay-elsewhere/bare"]
    assert "idemkit" in {place.name for place in chosen(["local"]).places}
    assert all(place.peer is None for place in chosen(["local", "effects"], peers=False).places)
    with pytest.raises(BenchError, match="known are"):
        named(["nonsense"])
    assert named(["local", "reap"]) == (["local"], ["reap"])
    everything, workers = named([""])
    assert {variant.name for variant in chosen(everything).variants} == {variant.name for variant in VARIANTS}
    assert workers == ["drain", "reap"]


def test_baseline_commit_runs_only_for_oncekey_variants() -> None:
    both = chosen(["local", "replay-elsewhere"], baseline=True)
    before = {place.name: place for place in both.places if place.before}
    assert set(before) == {"asyncpg@before", "cached@before", "elsewhere@before", "shared@before"}
    assert before["elsewhere@before"].shares == "asyncpg@before"
    assert "local/before" in {ratio.name for ratio in both.ratios}
    left = without(both, ["cached", "cached@before"])
    assert not any("cached" in name for ratio in left.ratios for name in (ratio.ours, ratio.base))


def test_each_settled_key_is_replayed_once_by_the_other_process() -> None:
    made = rounds.Keys(Sends.NEW, "/orders", settled := rounds.deque())
    elsewhere = rounds.Keys(Sends.ELSEWHERE, "/orders", settled)
    sent = made.next()
    assert elsewhere.next() is None  # not before it was answered
    made.answered()
    assert elsewhere.next() == sent
    assert elsewhere.next() is None
    assert b"idempotency-key" not in (rounds.Keys(Sends.NO_KEY, "/orders", settled).next() or b"")


async def test_failed_start_skips_a_peer_and_raises_for_an_oncekey_server(tmp_path: Path) -> None:
    # This environment has no idemkit, so that its application cannot be imported.
    peer = Place("idemkit", "idemkit", Store.NONE, peer="idemkit")
    with Serving(Stores(None, tmp_path), {"idemkit": Path(sys.executable)}, None) as serving:
        assert await serving.start([peer]) == {"idemkit": "its server did not start"}
        with pytest.raises(BenchError, match="did not start"):
            await serving.start([Place("ours", "no_such_application", Store.NONE)])


def test_no_round_begins_that_would_end_too_late() -> None:
    # It began at 0, the first round at 100; two rounds took 20 seconds each.
    assert not rounds._too_late(0, 100, 140, 2, minutes=160 / 60)
    assert rounds._too_late(0, 100, 140, 2, minutes=159 / 60)


def test_bench_check_raises_if_executed_requests_have_no_rows(tmp_path: Path) -> None:
    wanted = chosen(["sqlite"], peers=False)
    stores = Stores(None, tmp_path)
    field = rounds.Field(wanted, Serving(stores, {}, None), 1)
    [address] = stores.addresses(wanted.places[0])
    field._executed["sqlite", "bench_order"] = 2
    with closing(sqlite3.connect(address.removeprefix("sqlite:///"))) as file:
        file.execute("INSERT INTO bench_order (product, quantity) VALUES ('p', 1)")
        file.commit()
        with pytest.raises(BenchError, match="2 requests were executed, and bench_order has 1 rows"):
            field.check(stores)
        file.execute("INSERT INTO bench_order (product, quantity) VALUES ('p', 1)")
        file.commit()
        field.check(stores)


class _Slow:
    """Lanes of a server that answers so many requests in a slice, however long it is."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    async def fire(self, load: Load) -> Volley:
        volley = Volley(seconds=1.0)
        while volley.count < min(self.answers, load.at_most) and load.request() is not None:
            volley.latencies.append(0.001)
        return volley


class _Awake:
    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def said(self) -> str:
        return ""


async def test_replay_elsewhere_variants_never_run_out_of_keys(tmp_path: Path) -> None:
    wanted = chosen(["replay-elsewhere"], peers=False, baseline=True)
    field = rounds.Field(wanted, Serving(Stores(None, tmp_path), {}, None), 1)
    replaying = [one for one in wanted.variants if one.sends is Sends.ELSEWHERE]
    assert [one.name for one in replaying] == ["replay-elsewhere", "replay-elsewhere@before"]
    for place in wanted.places:
        field._servers[place.name] = _Awake()  # type: ignore[assignment]
        field._lanes[place.name] = _Slow(500 if "elsewhere" in place.name else 30)  # type: ignore[assignment]
    for _ in range(4):  # turn after turn, and nobody makes keys in between
        for variant in replaying:
            await field.stock(variant, 5000)
            assert (await field.fire(variant, 1.0, 5000)).count >= 300


def test_processor_time_grows_with_work() -> None:
    before = clocks.seconds_of(os.getpid())
    if before is None:
        assert sys.platform != "linux"
        return
    sum(range(200_000))
    after = clocks.seconds_of(os.getpid())
    assert after is not None
    assert after > before
    assert clocks.added({1: 2.0, 2: 1.0}, {1: 2.5, 3: 0.25}) == 0.75  # 2 has ended, 3 is new


@asynccontextmanager
async def _serving(end: bytes, answer: bytes | None = None) -> AsyncIterator[int]:
    """A server that answers whatever ends so, always the same or with what it was sent."""
    talks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while said := await reader.readuntil(end):
                writer.write(said if answer is None else answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await asyncio.gather(*talks, return_exceptions=True)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}", None),
        (b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", None),
        (b"HTTP/1.1 201 Created\r\nIdempotent-Replayed: true\r\ncontent-length: 0\r\n\r\n", "a response with replayed"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "http/1.1 503 service unavailable"),
    ],
)
async def test_load_run_stops_at_an_unexpected_response(answer: bytes, complaint: str | None) -> None:
    load = Load(lambda: b"GET / HTTP/1.1\r\n\r\n", b"201", unmarked=b"replayed", at_most=20)
    async with _serving(b"\r\n\r\n", answer) as port:
        volley = await fire(port, load, connections=2)
    assert volley.wrong[:1] == ([] if complaint is None else [complaint])
    assert volley.count == 20 if complaint is None else volley.count < 20
    assert volley.seconds > 0


async def test_a_load_ends_with_its_requests() -> None:
    left = [b"GET / HTTP/1.1\r\n\r\n"] * 3
    async with _serving(b"\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as port:
        volley = await fire(port, Load(lambda: left.pop() if left else None, b"200"), connections=2)
    assert (volley.count, volley.wrong) == (3, [])


async def test_the_relay_counts_turns_not_packets() -> None:
    async with _serving(b";") as port, await Relay.open(port) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        for words in (b"begin;", b"insert;", b"commit;"):
            writer.write(words[:3])
            await writer.drain()
            writer.write(words[3:])
            assert await reader.readexactly(len(words)) == words
        assert relay.turns == 3
        writer.close()
        await writer.wait_closed()


def test_start_up_is_compared_within_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    took = {"pass": 0.25, startup.HELP: 0.75, "import typer, rich": 0.5, "import fastapi": 1.25, "import oncekey": 0.5}
    monkeypatch.setattr(startup, "seconds", lambda script: took.get(script, 0.25))
    monkeypatch.setattr(sys, "argv", ["startup", "--rounds", "3", "--json"])

    startup.main()

    said = json.loads(capsys.readouterr().out)
    assert said["seconds"]["oncekey --help"] == 0.5  # what the interpreter itself takes is taken off
    assert said["ratios"] == {"oncekey --help": 2.0, "import oncekey": 0.25, "from oncekey import Once": 0.0}


def test_startup_bench_runs_scripts_in_a_new_interpreter() -> None:
    assert startup.seconds("pass") > 0
    with pytest.raises(subprocess.CalledProcessError):
        startup.seconds("import no_such_module_of_ours")
