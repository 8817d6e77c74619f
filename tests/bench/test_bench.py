"""The bench runs, and says what it says from what it measured."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from bench.figures import BASE, Result, Slice, document, table
from bench.load import Load, fire

from bench import startup
from harness.ports import free_port

ROOT = Path(__file__).parents[2]


def _slice(rate: float) -> Slice:
    return Slice(rate=rate, p50_ms=1, p99_ms=2, requests=100)


def test_a_quick_run_prints_ratios(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", "--quick", "--store", "sqlite", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("sqlite")]
    assert [row[1] for row in rows] == ["unprotected", "new", "replay"]
    measured = json.loads(figures.read_text())["stores"]["sqlite"]
    assert measured[BASE]["ratio"] == {"median": 1, "low": 1, "high": 1}
    for kind in ("new key", "replay"):
        assert 0 < measured[kind]["ratio"]["low"] <= measured[kind]["ratio"]["median"]
        assert len(measured[kind]["rounds"]) == 2


def test_ratios_are_of_the_same_round() -> None:
    result = Result("sqlite")
    result.rounds[BASE] = [_slice(100), _slice(1000), _slice(10)]
    result.rounds["new key"] = [_slice(50), _slice(600), _slice(7)]
    result.rounds["replay"] = [_slice(200), _slice(2000), _slice(20)]
    ratio = result.ratio("new key")
    assert (ratio.low, ratio.median, ratio.high) == (0.5, 0.6, 0.7)
    assert "0.60 (0.50-0.70)" in table([result])
    assert document([result], {})["settings"] == {}


@asynccontextmanager
async def _answering(answer: bytes) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    port = free_port()
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    yield port
    server.close()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}", None),
        (b"HTTP/1.1 201 Created\r\nIdempotent-Replayed: true\r\ncontent-length: 0\r\n\r\n", "an answer with replayed"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 503 Service Unavailable"),
    ],
)
async def test_wrong_answers_are_no_figures(answer: bytes, complaint: str | None) -> None:
    load = Load(lambda: b"GET / HTTP/1.1\r\n\r\n", b"201", unmarked=b"replayed", connections=2, at_most=20)
    async with _answering(answer) as port:
        volley = await fire(port, load)
    assert volley.wrong[:1] == ([] if complaint is None else [complaint])
    assert 2 <= volley.count <= 22
    assert volley.rate > 0


def test_start_up_is_compared_within_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    took = {"pass": 0.25, startup.HELP: 0.75, "import typer, rich": 0.5, "import fastapi": 1.25, "import oncekey": 0.5}
    monkeypatch.setattr(startup, "seconds", lambda script: took.get(script, 0.25))
    monkeypatch.setattr(sys, "argv", ["startup", "--rounds", "3", "--json"])

    startup.main()

    said = json.loads(capsys.readouterr().out)
    assert said["seconds"]["oncekey --help"] == 0.5  # what the interpreter itself takes is taken off
    assert said["ratios"] == {"oncekey --help": 2.0, "import oncekey": 0.25, "from oncekey import Once": 0.0}


def test_the_bench_of_start_up_starts_interpreters() -> None:
    assert startup.seconds("pass") > 0
    with pytest.raises(subprocess.CalledProcessError):
        startup.seconds("import no_such_module_of_ours")
