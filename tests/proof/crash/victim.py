"""A real process that ends itself at a place: any command of `oncekey`, with a crasher where its driver is.

    python -m proof.crash.victim --point after:charge:1 --signal KILL -- demo --port 8001
    python -m proof.crash.victim --point after:due:1 --signal STOP -- worker --app oncekey_demo.service:once

The places are those of the process, counted from its start. The demo's call to its provider is called `charge`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any, Final

from oncekey import once, wire
from oncekey.engine.shell import AsyncEngine
from oncekey_demo import charging
from proof.crash.crasher import Crasher, Fault, Manner, Point
from proof.patching import patched

if TYPE_CHECKING:
    from oncekey_demo.charging import Reply


CHARGE: Final = "charge"
SIGNALS: Final = {"KILL": Manner.KILL, "STOP": Manner.STOP}


def main(arguments: list[str] | None = None) -> None:
    """Run a command of `oncekey` up to a place."""
    parser = ArgumentParser(prog="python -m proof.crash.victim", description="Die at a named place.")
    parser.add_argument("--point", required=True, type=Point.parse, help="before:NAME:NUMBER or after:NAME:NUMBER")
    parser.add_argument("--signal", required=True, choices=SIGNALS)
    parser.add_argument("command", nargs="+", help="the command of oncekey and its options, after --")
    asked = parser.parse_args(arguments)
    crasher = Crasher(Fault(asked.point, SIGNALS[asked.signal]))
    with mortal(crasher):
        from oncekey.cli import main as command

        sys.argv = ["oncekey", *asked.command]
        command()


def mortal(crasher: Crasher) -> Any:
    """All that this process says to a store or to the demo's provider passes by the crasher."""

    def connect(source: wire.Source) -> AsyncEngine:
        inner = wire.aconnect_to(source)
        return AsyncEngine(inner.store, crasher.driver(inner.driver))

    real = charging.ask

    async def ask(method: str, *args: Any, **given: Any) -> Reply:
        if method != "POST":
            return await real(method, *args, **given)
        return await crasher.outside(CHARGE, lambda: real(method, *args, **given))

    return patched((once, "aconnect_to", connect), (charging, "ask", ask))


if __name__ == "__main__":
    main()
