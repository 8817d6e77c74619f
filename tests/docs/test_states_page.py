"""The page of states is drawn from the tables; that the committed one is the drawn one, `test_reference.py` says."""

import re

from harness.pages import ROOT, generator
from oncekey.core.guards import Guard
from oncekey.core.model import State
from oncekey.core.rulings import RULINGS, Situation
from oncekey.core.transitions import MOVERS, ROWS, Actor, Trigger

diagram, drawing = generator().states, generator().drawing
ARROW = re.compile(r'<path d="M(\d+) (\d+) Q\d+ \d+ (\d+) (\d+)"[^>]*/><text class="label"[^>]*>([\d, ]+)</text>')


def lines_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_drawing_has_every_move_and_no_other():
    drawn = drawing.states()
    moves = {(row.source, row.to) for row in ROWS if row.number not in drawing.LEFT_OUT}
    assert len(ARROW.findall(drawn)) == sum(source != to for source, to in moves)
    numbers = [
        int(number) for label in re.findall(r'class="label"[^>]*>([^<]+)<', drawn) for number in label.split(",")
    ]
    lines = {(row.source, row.to, row.number) for row in ROWS if row.number not in drawing.LEFT_OUT}
    assert sorted(numbers) == sorted(number for _, _, number in lines)


def test_every_layer_of_the_contract_is_drawn():
    drawn = drawing.layers()
    assert [name for name in ("core", "engine", "stores", "databases", "cli") if f">{name}</text>" not in drawn] == []


def test_the_table_has_every_row():
    lines = lines_of(diagram.transitions())
    assert {int(line[0]) for line in lines} == set(range(1, 36))
    sources = sum(len(line[1].split(", ")) for line in lines)
    assert sources == len(ROWS)
    assert all(len(line) == 8 for line in lines)


def test_states_page_lists_each_row_once_under_its_actor():
    page = diagram.page()
    places = [page.index(text) for movers in MOVERS for text in (movers.about, diagram.transitions(movers.rows))]
    assert places == sorted(places)
    assert sum(len(lines_of(diagram.transitions(movers.rows))) for movers in MOVERS) == len(
        lines_of(diagram.transitions())
    )
    assert {actor for row in ROWS for actor in row.by} == set(Actor)


def test_transition_table_line_matches_its_row():
    lines = lines_of(diagram.transitions())
    assert next(line[:7] for line in lines if line[0] == "8") == [
        "8",
        "unknown, failed retryable",
        "settle",
        "completed",
        "owner",
        "owner",
        "same",
    ]


def test_every_situation_guard_and_state_is_explained():
    assert len(lines_of(diagram.rulings())) == len(RULINGS) == len(Situation)
    assert {line[0].replace(" ", "_").upper() for line in lines_of(diagram.needs())} == {g.name for g in Guard}
    assert all(line[1] for line in lines_of(diagram.needs()))
    assert all(f"| `{state}` |" in diagram.page() for state in State)


def test_words_of_the_transition_table_are_in_the_glossary():
    terms = "".join((ROOT / f"docs/explanation/{name}.md").read_text() for name in ("glossary", "architecture")).lower()
    moving = set(Trigger) - {Trigger.DECLINED, Trigger.DISCLOSE, Trigger.LOG_OUT}  # no record moves by them
    words = {name.replace("_", " ") for name in (*moving, *Actor, *State)}
    assert sorted(word for word in words if not re.search(rf"\b{word}\b", terms)) == []


def test_the_glossary_is_short():
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/explanation/glossary.md").read_text(), re.MULTILINE)
    assert len(terms) <= 40
    assert terms == sorted(terms)
