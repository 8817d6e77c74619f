"""`python -m bench`: the cost of a protected request, compared with an unprotected one and with other packages.

It starts a private PostgreSQL and one server process for each application, which take turns under load; then workers
empty an outbox, and a reaper works during a load. It writes figures without a verdict: tables to the terminal,
`results.json`, and a page with plots.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import growth, outbox_drain, page, prepared, reap, results, rounds, serving, summary
from bench.figures import BenchError
from bench.places import ROOT
from bench.variants import VARIANTS, WORKERS, Chosen, chosen, named, without

JSON, PAGE = "results.json", "index.html"
FULL = 50_000
"""Messages in a full outbox."""
LINES = 200
"""The number of ordered queues."""


def say(words: str) -> None:
    """Write progress to standard error, apart from the figures."""
    start = "\r\033[K" if sys.stderr.isatty() else ""  # overwrites the progress line
    print(f"{start}bench: {words}", file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    """Measure, or show earlier results."""
    said = _parser().parse_args(words)
    # Exits like Ctrl-C, so that every started process is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if said.list:
            for variant in VARIANTS:
                print(f"{variant.group:<9} {variant.name:<22} {variant.title}")
            for name, title in WORKERS.items():
                print(f"{'workers':<9} {name:<22} {title}")
        elif said.check:
            return _check()
        elif said.readme:
            _readme(_results(said.out))
        elif said.render:
            (said.out / PAGE).write_text(page.page(_results(said.out)))
            say(f"{PAGE} is in {said.out}")
        else:
            _measure(said)
    except BenchError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("stopped; nothing was written")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    plan, drain = rounds.Plan(), outbox_drain.Plan()
    requests = parser.add_argument_group("requests")
    requests.add_argument("--rounds", type=_positive, default=plan.rounds, help=f"rounds ({plan.rounds})")
    requests.add_argument("--turns", type=_positive, default=plan.turns, help=f"slices per round ({plan.turns})")
    requests.add_argument(
        "--seconds", type=float, default=plan.seconds, help=f"seconds per variant and round ({plan.seconds})"
    )
    requests.add_argument(
        "--connections", type=_positive, default=plan.connections, help=f"requests at once ({plan.connections})"
    )
    requests.add_argument(
        "--requests", type=_positive, default=plan.at_most, help=f"maximum per slice ({plan.at_most})"
    )
    requests.add_argument(
        "--minutes", type=float, default=plan.minutes, help=f"start no round that would end later ({plan.minutes:g})"
    )
    requests.add_argument("--without-peers", action="store_true", help="neither install nor measure other packages")
    requests.add_argument("--baseline", metavar="REF", help="also measure the sources of a commit, as 'before'")
    requests.add_argument("--pin", action="store_true", help="servers on the first core, the load on others (Linux)")
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--messages", type=_positive, default=drain.messages, help=f"in the outbox, per round ({drain.messages})"
    )
    workers.add_argument("--rows", type=_positive, default=reap.ROWS, help=f"for the reaper to remove ({reap.ROWS})")
    workers.add_argument("--full", action="store_true", help=f"{FULL} messages and {reap.FULL} rows")
    what = parser.add_argument_group("what to do")
    what.add_argument(
        "--only",
        default="",
        metavar="NAMES",
        help="variants or groups, and the variants they are compared with; drain, reap; --list shows all",
    )
    what.add_argument("--out", type=Path, default=ROOT / "bench-results", help="folder for results (bench-results)")
    what.add_argument("--list", action="store_true", help="list what can be measured")
    what.add_argument("--render", action="store_true", help="render the page from existing results")
    what.add_argument(
        "--readme",
        action="store_true",
        help="store the last results in bench/kept.json, and write them into the README and the sizing page",
    )
    what.add_argument(
        "--check",
        action="store_true",
        help="fail if the figures of the README or the sizing page differ from bench/kept.json",
    )
    return parser


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError(word)
    return number


def _measure(said: argparse.Namespace) -> None:
    pin = said.pin and hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1
    plan = rounds.Plan(said.rounds, said.turns, said.seconds, said.connections, said.requests, pin, said.minutes)
    only, beside = named(word.strip() for word in said.only.split(","))
    wanted = chosen(only, peers=not said.without_peers, baseline=said.baseline is not None)
    commits, missing, before = prepared.present(), {}, None
    with tempfile.TemporaryDirectory(prefix="oncekey-bench-") as folder:
        if said.baseline is not None:
            commits["before"] = prepared.commit_of(said.baseline)
            before = prepared.sources_of(str(commits["before"]), Path(folder))
        names = dict.fromkeys(place.peer for place in wanted.places if place.peer is not None)
        pythons, missing = prepared.peers(names, say)
        wanted = _installed(wanted, missing)
        with serving.stores(wanted.places, pythons) as stores:
            machine = results.machine(str(stores.asked("SHOW server_version")[0]).split()[0])
            measured = None
            if wanted.variants:
                measured = rounds.run(rounds.Run(plan, stores, pythons, before, say), wanted)
    # Requests are measured first, before the workers load the machine.
    workers = _workers(said, beside)
    document = results.document(measured, plan, machine, commits, missing, workers=workers)
    said.out.mkdir(parents=True, exist_ok=True)
    (said.out / JSON).write_text(json.dumps(document, indent=2) + "\n")
    (said.out / PAGE).write_text(page.page(document))
    for told in (results.tables(document), summary.table(document)):
        if told:
            print(told, end="\n\n")
    print(f"{document['settings']['rounds']} rounds, {plan.connections} connections; median (lowest-highest).")
    print(summary.noise(document))
    say(f"{JSON} and {PAGE} are in {said.out}")


def _workers(said: argparse.Namespace, beside: Sequence[str]) -> dict[str, Any]:
    """The figures of workers, each on a separate server."""
    found: dict[str, Any] = {}
    if "drain" in beside:
        messages = FULL if said.full else said.messages
        for name, lines in (("drain", 0), ("drain_ordered", LINES)):
            plan = outbox_drain.Plan(messages=messages, rounds=said.rounds, lines=lines)
            found[name] = outbox_drain.document(outbox_drain.measured(plan, outbox_drain.OURS, say), plan)
    if "reap" in beside:
        rows = reap.FULL if said.full else said.rows
        found["reap"] = reap.measured(rows, reap.CLIENTS, reap.TURN, say)
    return found


def _installed(wanted: Chosen, missing: Mapping[str, str]) -> Chosen:
    return without(wanted, [place.name for place in wanted.places if place.peer in missing])


def _results(folder: Path) -> summary.Document:
    try:
        return dict(json.loads((folder / JSON).read_text()))
    except FileNotFoundError:
        raise BenchError(f"there are no results in {folder}: run make bench") from None


def _readme(document: summary.Document) -> None:
    kept = summary.kept(document)
    for name, figures in summary.PUBLISHED.items():
        text = (ROOT / name).read_text()
        (ROOT / name).write_text(text.replace(summary.between_markers(text), figures(kept)))
    summary.KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    say(f"{' and '.join(summary.PUBLISHED)} have the figures of {document['made']}, which {summary.KEPT.name} stores")


def _check() -> int:
    kept = json.loads(summary.KEPT.read_text())
    stale = [
        name
        for name, figures in summary.PUBLISHED.items()
        if summary.between_markers((ROOT / name).read_text()) != figures(kept)
    ]
    for name in stale:
        say(f"the figures of {name} and {summary.KEPT.name} differ: run python -m bench --readme")
    grown = growth.stale()
    for name in grown:
        say(f"the figures of {name} and {growth.KEPT.name} differ: run python -m bench.scale --full --keep")
    return int(bool(stale or grown))


if __name__ == "__main__":
    sys.exit(main())
