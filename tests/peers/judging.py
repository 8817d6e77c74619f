"""Other packages judged by `oncekey-check`, each in a shop that is built as its README shows.

    python tests/peers/judging.py

prints the table of docs/explanation/comparison.md, and `--write` puts it there. `make peers` gets the packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from bench.places import ROOT
from bench.prepared import PINS, interpreter, is_made

from harness.brokers import Valkey
from oncekey_check import CLAUSES

SHOPS = ROOT / "tests" / "peers" / "served"
PAGE = ROOT / "docs" / "explanation" / "comparison.md"
BEGIN, END = "<!-- findings -->", "<!-- /findings -->"
ORDER = '{"item": "teapot", "quantity": 2}'
SLOW = "0.4"
NODE = "express-idempotency"
WORDS = {"failed": "**broken**", "advice": "advice", "passed": "kept", "allowed": "kept"}
"""The results as the table names them; a clause with another one could not be judged."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A package, and what the owner of its shop tells the tester."""

    name: str
    options: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The version that is pinned."""
        if self.name == NODE:
            return str(json.loads((PINS / NODE / "package.json").read_text())["dependencies"][NODE])
        found = re.search(rf"^{self.name}==(\S+)", (PINS / f"{self.name}.txt").read_text(), re.MULTILINE)
        assert found
        return found[1]


PEERS = (
    Peer("idemkit", ("--key-optional", "--marker-header", "Idempotency-Replayed")),
    Peer("asgi-idempotency-header", ("--key-optional",)),
    Peer("django-idempotency-key"),
    Peer(NODE, ("--key-optional",)),
)


class PeerMissingError(Exception):
    """A package is not here, and this is what to do."""


@contextmanager
def served(peer: Peer) -> Iterator[str]:
    """Start the shop of a package, and give the URL of its orders."""
    with ExitStack() as stack:
        words: list[str | Path] = [_program(peer)]
        environment = dict(os.environ)
        match peer.name:
            case "idemkit":
                words += [SHOPS / "on_fastapi.py", peer.name]
            case "asgi-idempotency-header":
                words += [SHOPS / "on_fastapi.py", peer.name, stack.enter_context(Valkey()).url]
            case "django-idempotency-key":
                words += [SHOPS / "on_django.py"]
            case _:
                words += [SHOPS / "on_express.cjs"]
                environment |= {"NODE_PATH": str(_modules()), "NODE_ENV": "production"}
        process = stack.enter_context(
            subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        )
        stack.callback(process.kill)
        assert process.stdout
        port = process.stdout.readline().strip()
        if not port:
            raise PeerMissingError(f"the shop of {peer.name} does not start: {[str(word) for word in words]}")
        yield f"http://127.0.0.1:{port}/orders"


def _program(peer: Peer) -> Path:
    found: Path | None
    if peer.name == NODE:
        pinned, there = PINS / NODE / "package-lock.json", _modules().parent / "package-lock.json"
        node = shutil.which("node")
        found = Path(node) if node and there.exists() and there.read_bytes() == pinned.read_bytes() else None
    else:
        found = interpreter(peer.name) if is_made(peer.name) else None
    if found is None:
        raise PeerMissingError(
            f"{peer.name} with its present pins is not here: run `make peers`, which needs pip and npm"
        )
    return found


def _modules() -> Path:
    return Path(sys.prefix) / NODE / "node_modules"


def command(peer: Peer, url: str) -> list[str]:
    """Return the words that check a shop."""
    return [
        *("oncekey", "check", url, "--body", ORDER, "--header", "Authorization: Bearer alpha"),
        *("--other-tenant-header", "Authorization: Bearer beta", "--count-url", url, "--count-pointer", "/total"),
        *("--slow-header", f"X-Slow: {SLOW}", "--fail-header", "X-Fail: 1", "--patience", "3", "--json", *peer.options),
    ]


def judged(peer: Peer, url: str) -> dict[str, Any]:
    """Run `oncekey-check`, and return its report."""
    words = command(peer, url)
    words[0] = str(Path(sys.executable).with_name("oncekey"))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in {0, 1}:
        raise AssertionError(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@contextmanager
def all_judged() -> Iterator[tuple[dict[Peer, str], dict[Peer, dict[str, Any]]]]:
    """Start every shop and check all of them at once; the shops serve until the block ends."""
    with ExitStack() as stack, ThreadPoolExecutor(len(PEERS)) as pool:
        urls = {peer: stack.enter_context(served(peer)) for peer in PEERS}
        yield urls, dict(zip(PEERS, pool.map(judged, urls, urls.values()), strict=True))


def results(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the result of each clause."""
    return {clause["id"]: clause["result"] for clause in report["clauses"]}


def table(reports: Mapping[Peer, Mapping[str, Any]]) -> str:
    """Return the clauses that at least one package breaks or gets advice for, with the result of each package."""
    found = {peer: results(report) for peer, report in reports.items()}
    heads = [f"{peer.name} {peer.version}" for peer in found]
    lines = [f"| Clause | Promise | {' | '.join(heads)} |", f"|{' --- |' * (2 + len(heads))}"]
    for clause in CLAUSES:
        row = [one[clause.id] for one in found.values()]
        if {"failed", "advice"} & set(row):
            cells = " | ".join(WORDS.get(word, "not judged") for word in row)
            lines.append(f"| `{clause.id}` | {clause.title} | {cells} |")
    return "\n".join(lines)


def written() -> str:
    """Return the table as the page has it."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    with all_judged() as (_, reports):
        found = table(reports)
    if "--write" in sys.argv:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
