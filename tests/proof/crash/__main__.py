"""The proof by hand: `python -m proof.crash --store URL [--case NAME] [--mutants]`."""

from __future__ import annotations

import asyncio
import logging
import sys
from argparse import ArgumentParser

from proof.crash.mutants import MUTANTS, hunt
from proof.crash.places import Place, keys
from proof.crash.proof import CASES, Stage, faults


def main(arguments: list[str] | None = None) -> int:
    """Run the proof on an empty database; 1 if a promise was broken, or a mutant got away."""
    parser = ArgumentParser(prog="python -m proof.crash", description="Kill a request everywhere.")
    parser.add_argument("--store", required=True, help="an empty database: sqlite:////tmp/proof.db, postgresql://...")
    parser.add_argument("--case", choices=[str(case) for case in CASES], help="only this one")
    parser.add_argument("--mutants", action="store_true", help="see where each mutant is caught")
    asked = parser.parse_args(arguments)
    log = logging.getLogger("oncekey")
    level = log.level
    log.setLevel(logging.CRITICAL)  # the crashes are meant, and their log lines no news
    place = Place(asked.store)
    place.prepare()
    try:
        return asyncio.run(_hunted(place) if asked.mutants else _proven(place, asked.case))
    finally:
        place.close()
        log.setLevel(level)


async def _proven(place: Place, only: str | None) -> int:
    names, broken = keys(), 0
    for case in CASES:
        if only is not None and only != str(case):
            continue
        async with Stage(place) as stage:
            seen = await stage.trail(case, next(names))
            verdicts = [seen, *[await stage.prove(case, next(names), fault) for fault in faults(seen)]]
        bad = [verdict for verdict in verdicts if verdict.broken]
        broken += len(bad)
        _say(f"{case!s:<42} {len(seen.points):>3} points {len(verdicts):>4} runs {len(bad):>3} broken")
        for verdict in bad:
            _say(str(verdict))
    return int(broken > 0)


async def _hunted(place: Place) -> int:
    names, free = keys(), 0
    for mutant in MUTANTS.values():
        if place.kind in mutant.stores:
            caught = await hunt(place, mutant, names)
            free += caught is None
            where = "NOT CAUGHT" if caught is None else f"{caught.fault.manner} {caught.fault.point}"
            _say(f"{mutant.name:<32} {where:<32} {'' if caught is None else caught.sentence}")
    return int(free > 0)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
