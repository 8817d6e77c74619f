"""`python -m bench`: what a protected request costs, beside the same one unprotected and beside other packages.

It starts a private PostgreSQL and one server process for each application, lets them take turns under load, and writes
figures, never a verdict: a table here, `results.json`, and a page with plots.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench import page, prepared, results, rounds, serving
from bench.figures import BenchError
from bench.places import ROOT
from bench.variants import VARIANTS, Chosen, chosen, without

__all__ = ["BenchError", "main"]

JSON, PAGE = "results.json", "index.html"


def say(words: str) -> None:
    """Progress goes beside the figures, not between them."""
    print(f"bench: {words}", file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> int:
    """Measure, or show again what was measured."""
    said = _parser().parse_args(words)
    # The same way out as Ctrl-C: everything that was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if said.list:
            for variant in VARIANTS:
                print(f"{variant.group:<9} {variant.name:<22} {variant.title}")
        elif said.readme:
            return _readme(said.out / JSON, check=said.check)
        elif said.render:
            (said.out / PAGE).write_text(page.page(json.loads((said.out / JSON).read_text())))
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
    plan = rounds.Plan()
    parser.add_argument("--rounds", type=_positive, default=plan.rounds, help=f"rounds ({plan.rounds})")
    parser.add_argument("--turns", type=_positive, default=plan.turns, help=f"slices per round ({plan.turns})")
    parser.add_argument(
        "--seconds", type=float, default=plan.seconds, help=f"seconds per variant and round ({plan.seconds})"
    )
    parser.add_argument(
        "--connections", type=_positive, default=plan.connections, help=f"requests at once ({plan.connections})"
    )
    parser.add_argument(
        "--requests", type=_positive, default=plan.at_most, help=f"at most so many per slice ({plan.at_most})"
    )
    parser.add_argument(
        "--minutes", type=float, default=plan.minutes, help=f"begin no round that would end later ({plan.minutes:g})"
    )
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="variants or groups, with what they are compared with"
    )
    parser.add_argument("--without-peers", action="store_true", help="install and measure no other package")
    parser.add_argument("--baseline", metavar="REF", help="measure a commit beside the present sources, as 'before'")
    parser.add_argument("--pin", action="store_true", help="servers on the first core, the load on the others (Linux)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", help="folder for results (bench-results)")
    parser.add_argument("--list", action="store_true", help="list the variants")
    parser.add_argument("--render", action="store_true", help="make the page again from the results that are there")
    parser.add_argument(
        "--readme", action="store_true", help="print the README's figures from the results that are there"
    )
    parser.add_argument("--check", action="store_true", help="with --readme: fail if the README has others")
    return parser


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise ValueError(word)
    return number


def _measure(said: argparse.Namespace) -> None:
    pin = said.pin and hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1
    plan = rounds.Plan(said.rounds, said.turns, said.seconds, said.connections, said.requests, pin, said.minutes)
    only = [word.strip() for word in said.only.split(",") if word.strip()]
    wanted = chosen(only, peers=not said.without_peers, baseline=said.baseline is not None)
    commits = prepared.present()
    with tempfile.TemporaryDirectory(prefix="oncekey-bench-") as folder:
        before = None
        if said.baseline is not None:
            commits["before"] = prepared.commit_of(said.baseline)
            before = prepared.sources_of(str(commits["before"]), Path(folder))
        names = dict.fromkeys(place.peer for place in wanted.places if place.peer is not None)
        pythons, missing = prepared.peers(names, say)
        wanted = _installed(wanted, missing)
        with serving.stores(wanted.places, pythons) as stores:
            machine = results.machine(str(stores.asked("SHOW server_version")[0]).split()[0])
            measured = rounds.run(rounds.Run(plan, stores, pythons, before, say), wanted)
    document = results.document(measured, plan, machine, commits, missing)
    said.out.mkdir(parents=True, exist_ok=True)
    (said.out / JSON).write_text(json.dumps(document, indent=2) + "\n")
    (said.out / PAGE).write_text(page.page(document))
    print(results.tables(document))
    print(f"\n{document['settings']['rounds']} rounds, {plan.connections} connections; median (lowest-highest).")
    print(results.noise_line(document))
    say(f"{JSON} and {PAGE} are in {said.out}")


def _installed(wanted: Chosen, missing: Mapping[str, str]) -> Chosen:
    return without(wanted, [place.name for place in wanted.places if place.peer in missing])


def _readme(file: Path, *, check: bool) -> int:
    if not file.exists():
        raise BenchError("there are no results yet: make bench")
    figures = results.readme(json.loads(file.read_text()))
    if not check:
        print(figures)
        return 0
    if results.between_markers((ROOT / "README.md").read_text()) == figures:
        return 0
    say("the README's figures are not those of the last run: python -m bench --readme prints them")
    return 1


if __name__ == "__main__":
    sys.exit(main())
