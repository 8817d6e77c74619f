"""`oncekey kit`: what it writes, what it leaves alone, and what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.operating import oncekey
from oncekey.kit import making
from oncekey.kit.making import ALERTS, DASHBOARD
from oncekey.kit.settings import SETTINGS, Part, chosen, filled


def written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def fates(*arguments: str) -> tuple[int, dict[str, str]]:
    result = oncekey("kit", *arguments, "--json")
    said = json.loads(result.stdout)
    assert set(said) == {"now", "items", "next"}
    return result.exit_code, {item["file"]: item["fate"] for item in said["items"]}


def test_it_writes_everything_and_says_what_to_do(tmp_path):
    folder = tmp_path / "a" / "kit"
    result = oncekey("kit", str(folder))
    assert result.exit_code == 0
    files = written(folder)
    assert {name.split("/")[0] for name in files} == {"prometheus", "grafana", "systemd", "kubernetes", "runbooks"}
    assert all(f"{folder / name}  " in result.stdout for name in files)
    assert result.stdout.count("written") == len(files)
    steps = result.stdout.partition("What to do now\n")[2]
    assert re.findall(r"^  (\w+)  ", steps, re.MULTILINE) == [part.value for part in Part]
    assert f"promtool check rules {folder / ALERTS}" in steps
    assert "--set runbooks=" in steps  # the links of the alerts lead nowhere yet


def test_the_default_folder_is_in_the_working_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert oncekey("kit", "--only", "dashboard").exit_code == 0
    assert written(tmp_path) == {f"oncekey-kit/{DASHBOARD}"}


def test_only_some_parts(tmp_path):
    code, said = fates(str(tmp_path), "--only", "alerts", "--only", "dashboard")
    assert (code, set(said.values())) == (0, {"written"})
    assert written(tmp_path) == {ALERTS, DASHBOARD}


def test_what_is_in_the_way_stays_and_nothing_else_is_written(tmp_path):
    mine = tmp_path / ALERTS
    mine.parent.mkdir()
    mine.write_text("groups: []  # my own\n")
    code, said = fates(str(tmp_path))
    assert code == 1
    assert said[str(mine)] == "in the way"
    assert written(tmp_path) == {ALERTS}
    text = oncekey("kit", str(tmp_path))
    assert (text.exit_code, text.stdout) == (1, "")
    assert str(mine) in text.stderr
    assert "--force" in text.stderr
    assert mine.read_text() == "groups: []  # my own\n"


def test_force_replaces_what_differs_and_leaves_the_rest(tmp_path):
    assert fates(str(tmp_path), "--only", "alerts", "--only", "dashboard")[0] == 0
    (tmp_path / ALERTS).write_text("groups: []\n")
    (tmp_path / "prometheus" / "mine.yaml").write_text("mine")
    untouched = (tmp_path / DASHBOARD).stat().st_mtime_ns
    code, said = fates(str(tmp_path), "--only", "alerts", "--only", "dashboard", "--force")
    assert (code, said) == (0, {str(tmp_path / ALERTS): "replaced", str(tmp_path / DASHBOARD): "unchanged"})
    assert (tmp_path / DASHBOARD).stat().st_mtime_ns == untouched
    assert (tmp_path / "prometheus" / "mine.yaml").read_text() == "mine"
    assert written(tmp_path) == {ALERTS, DASHBOARD, "prometheus/mine.yaml"}


def test_saying_it_again_changes_nothing(tmp_path):
    assert fates(str(tmp_path))[0] == 0
    code, said = fates(str(tmp_path))
    assert (code, set(said.values())) == (0, {"unchanged"})


def test_what_was_said_is_in_the_files(tmp_path):
    fates(
        str(tmp_path),
        "--set",
        "unknown-age=15m",
        "--set",
        "runbooks=https://wiki.example.com/nights",
        "--set",
        "by=job",
    )
    rules = (tmp_path / ALERTS).read_text()
    assert "> 900\n" in rules
    assert 'runbook_url: "https://wiki.example.com/nights/unknown-old.md"' in rules
    again = "oncekey kit --set runbooks=https://wiki.example.com/nights --set unknown-age=15m"
    assert rules.splitlines()[0].endswith(f"Made by: {again}")
    assert again in json.loads((tmp_path / DASHBOARD).read_text())["description"]
    said = oncekey(
        "kit", str(tmp_path), "--set", "unknown-age=15m", "--set", "runbooks=https://wiki.example.com/nights"
    )
    assert said.stdout.count("unchanged") == len(written(tmp_path))
    assert "lead nowhere" not in said.stdout


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("unknown-age", "say NAME=VALUE; `oncekey kit --settings` lists the names"),
        ("unknown_age=15m", "say NAME=VALUE"),
        ("unknown-age=15", "unknown-age is a span of time"),
        ("unknown-age=0s", "a span of time"),
        ("zombies=-1", "a whole number"),
        ("reservation-failures=0.01", "a share"),
        ("health-port=70000", "a port"),
        ("by=job)", "the names of labels"),
        ('runbooks=https://wiki/"\nexpr: 1', "a URL"),
        ("app=shop.main", "a place in your code"),
        ("user=Shop Owner", "a plain name"),
        ("program=oncekey", "a whole path"),
        ("image=shop:1\n- b", "an image"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, said, why):
    result = oncekey("kit", str(tmp_path / "kit"), "--set", said)
    assert result.exit_code == 2
    assert why in result.stderr
    assert not (tmp_path / "kit").exists()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "kit").write_text("")
    result = oncekey("kit", str(tmp_path / "kit"))
    assert (result.exit_code, "no folder" in result.stderr) == (2, True)
    (tmp_path / "grafana").write_text("")
    assert oncekey("kit", str(tmp_path), "--only", "dashboard").exit_code == 2
    assert (tmp_path / "grafana").read_text() == ""


def test_settings_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = oncekey("kit", "--settings", "--set", "unknown-age=15m").stdout
    assert all(re.search(rf"^{name} ", text, re.MULTILINE) for name in SETTINGS)
    items = json.loads(oncekey("kit", "--settings", "--set", "unknown-age=15m", "--json").stdout)["items"]
    (one,) = (item for item in items if item["name"] == "unknown-age")
    assert (one["default"], one["value"], one["parts"]) == ("1h", "15m", ["alerts", "dashboard"])
    assert written(tmp_path) == set()


def test_every_setting_is_used_by_the_parts_that_it_names_and_no_other():
    other = {"SPAN": "7h", "COUNT": "77", "PORT": "7777", "SHARE": "7%", "LABELS": "cluster", "WORD": "seven",
             "URL": "https://seven.example", "PATH": "/seven", "PLACE": "seven:eight", "IMAGE": "seven:7"}  # fmt: skip
    plain = {file.name: file for file in making.made(Part, chosen(()))}
    for setting in SETTINGS.values():
        changed = making.made(Part, chosen([f"{setting.name}={other[setting.kind.name]}"]))
        said = f" --set {setting.name}={other[setting.kind.name]}"
        parts = {file.part for file in changed if file.content.replace(said, "") != plain[file.name].content}
        # The rules are the operator's manifest, too.
        assert parts == {*setting.parts, *([Part.KUBERNETES] if Part.ALERTS in setting.parts else [])}, setting.name


def test_no_blank_is_left_and_every_default_fits_its_kind():
    assert set(filled(chosen(()))) > set(SETTINGS)
    assert chosen(f"{one.name}={one.default}" for one in SETTINGS.values()) == chosen(())
    for file in making.made(Part, chosen(())):
        assert "[[" not in file.content
