"""The page of states is drawn from the tables, and the committed page is the drawn one."""

import re
import subprocess
import sys
from pathlib import Path

from oncekey.core import diagram
from oncekey.core.guards import Guard
from oncekey.core.model import State
from oncekey.core.rulings import RULINGS, Situation
from oncekey.core.transitions import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "states.md"
EDGE = re.compile(r"    (\S+) --> (\S+): (.+)")


def lines_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_committed_page_is_the_drawn_one():
    assert PAGE.read_text(encoding="utf-8") == diagram.page(), (
        "run: python -m oncekey.core.diagram > docs/explanation/states.md"
    )


def test_the_command_writes_the_page():
    done = subprocess.run([sys.executable, "-m", "oncekey.core.diagram"], capture_output=True, check=True)
    assert done.stdout.decode() == diagram.page()


def test_the_diagram_has_every_move_and_no_other():
    drawn = set()
    for line in diagram.mermaid().splitlines()[1:]:
        source, to, label = EDGE.fullmatch(line).groups()
        for trigger, numbers in re.findall(r"([a-z ]+?) \(([\d, ]+)\)", label):
            drawn |= {(source, to, trigger.strip(), int(number)) for number in numbers.split(",")}
    assert drawn == {(row.source or "[*]", row.to or "[*]", row.trigger.replace("_", " "), row.number) for row in ROWS}


def test_the_table_has_every_row():
    lines = lines_of(diagram.transitions())
    assert {int(line[0]) for line in lines} == set(range(1, 35))
    sources = sum(len(line[1].split(", ")) for line in lines)
    assert sources == len(ROWS)
    assert all(len(line) == 8 for line in lines)


def test_a_line_says_what_its_row_says():
    lines = lines_of(diagram.transitions())
    assert next(line[:7] for line in lines if line[0] == "8") == [
        "8",
        "unknown, failed retryable",
        "settle",
        "completed",
        "owner",
        "O",
        "same",
    ]


def test_every_situation_guard_and_state_is_explained():
    assert len(lines_of(diagram.rulings())) == len(RULINGS) == len(Situation)
    assert {line[0].replace(" ", "_").upper() for line in lines_of(diagram.needs())} == {g.name for g in Guard}
    assert all(line[1] for line in lines_of(diagram.needs()))
    assert all(f"| `{state}` |" in diagram.page() for state in State)
