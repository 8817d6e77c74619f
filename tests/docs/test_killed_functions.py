"""The programs of the guides to functions, consumers and blocking engines, whose process is killed in the middle."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.pages import ROOT, Page
from harness.patience import PATIENCE
from harness.tables import leases_run_out

RUNNER = """
import importlib, os, signal, sys
module, call, dies_at = importlib.import_module(sys.argv[1]), sys.argv[2], sys.argv[3]

def die(event):
    if ":".join([type(event).__name__, getattr(event, "name", "")]).rstrip(":") == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

module.once.observe(die)
print(eval(call, vars(module)))
"""


@dataclass(frozen=True)
class Program:
    """A program of a page, a call of its function, where its process is killed, and what is there in the end."""

    page: str
    file: str
    database: str
    tables: tuple[str, ...]
    call: str
    dies_at: tuple[str, ...]
    returns: tuple[str, str]
    """What the call returns after the kill, if it has to run again, and if it was committed before."""
    rows: tuple[str, list[tuple[object, ...]]]
    worker: bool = False
    """Whether a worker finishes it, without its caller."""


PAID = "Payment(id=1, charge='ch_"
PROGRAMS = (
    Program(
        "docs/howto/functions.md",
        "payments.py",
        "payments.db",
        ("CREATE TABLE payments (id INTEGER PRIMARY KEY, customer TEXT, amount TEXT)",),
        "pay(Invoice('7', 'ann', Decimal('9.90')))",
        ("Stepped:booked", "Stepped:charged"),
        (PAID, PAID),
        ("SELECT customer, amount FROM payments", [("ann", "9.90")]),
        worker=True,
    ),
    Program(
        "docs/howto/functions.md",
        "payments.py",
        "payments.db",
        ("CREATE TABLE payments (id INTEGER PRIMARY KEY, customer TEXT, amount TEXT)",),
        "book('7', 'ann')",
        ("Settled",),
        ("Payment(id=1, charge='')", "Payment(id=1, charge='')"),
        ("SELECT customer, amount FROM payments", [("ann", "0")]),
    ),
    Program(
        "docs/howto/functions.md",
        "inbox.py",
        "shop.db",
        ("CREATE TABLE stock (product TEXT, amount INTEGER)", "INSERT INTO stock VALUES ('tea', 10)"),
        "take_from_stock('m-1', {'product': 'tea'}).handling.name",
        ("Settled",),
        ("HANDLED", "DUPLICATE"),
        ("SELECT amount FROM stock", [(9,)]),
    ),
    Program(
        "docs/howto/sqlalchemy.md",
        "blocking_engine.py",
        "bookings.db",
        ("CREATE TABLE bookings (seat TEXT)",),
        "book('7', '1A')",
        ("Reserved", "Settled"),
        ("1", "1"),
        ("SELECT seat FROM bookings", [("1A",)]),
    ),
)
CASES = [pytest.param(one, died, id=f"{one.file}-{died}") for one in PROGRAMS for died in one.dies_at]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize(("program", "dies_at"), CASES)
def test_killed_function_of_a_guide_leaves_the_documented_state(program: Program, dies_at: str, tmp_path: Path) -> None:
    database, module = tmp_path / program.database, program.file.removesuffix(".py")
    (tmp_path / program.file).write_text(Page(ROOT / program.page).program(program.file))
    (tmp_path / "run_and_die.py").write_text(RUNNER)
    with closing(sqlite3.connect(database)) as file, file:
        for statement in program.tables:
            file.execute(statement)
    call = (sys.executable, "run_and_die.py", module, program.call)

    killed = run(tmp_path, *call, dies_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    leases_run_out(f"sqlite:///{database}")
    if program.worker:
        oncekey = str(Path(sys.executable).with_name("oncekey"))
        worked = run(tmp_path, oncekey, "worker", "--app", f"{module}:once", "--once")
        assert worked.returncode == 0, worked.stderr
    first, again = (run(tmp_path, *call, "nothing") for _ in range(2))
    committed = program.returns[1 if dies_at == "Settled" else 0]
    assert first.stdout.startswith(committed), first.stderr
    assert again.stdout.startswith(program.returns[1]), again.stderr
    with closing(sqlite3.connect(database)) as file:
        assert file.execute(program.rows[0]).fetchall() == program.rows[1]
