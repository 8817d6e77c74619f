"""`oncekey kit`: writes the files that a team needs to watch and run oncekey."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from oncekey.cli.printing import as_list, plain, table
from oncekey.core.errors import ConfigurationError
from oncekey.kit.making import ALERTS, DASHBOARD, MANIFESTS, OPERATOR_RULES, Fate, File, made, write
from oncekey.kit.settings import SETTINGS, Part, chosen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


REFUSED: Final = 1
"""The exit code for files that are in the way: nothing was written."""


def register(app: typer.Typer) -> None:
    """Add the command `kit`."""
    app.command("kit")(kit)


def kit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go.")] = Path("oncekey-kit"),
    *,
    only: Annotated[list[Part] | None, typer.Option("--only", help="Only this part; may be given again.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A threshold, a name, a place; may be given again."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have another content.")] = False,
    settings: Annotated[bool, typer.Option("--settings", help="List what --set takes, and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the files that a team needs to watch oncekey and to run it. They are yours to change from then on.

    Alert rules for Prometheus, a dashboard for Grafana, units for systemd and manifests for Kubernetes (a worker, the
    migrations), and a runbook for each alert. Thresholds and names are set by --set: --set unknown-age=15m --set
    runbooks=https://wiki.example.com/oncekey. Rules, units and manifests say in their first line how they were made.

    A file that is there already with another content is in the way: then nothing is written, unless --force says to
    replace it. A file with the same content is left alone, so the command can be repeated.

    Exit code: 0 written, 1 files are in the way (nothing was written), 2 a mistake.

    JSON: {"now", "items": [{"file", "part", "fate": "written" | "replaced" | "unchanged" | "in the way"}], "next"}; the
    items of --settings are {"name", "default", "value", "meaning", "parts"}.
    """
    values = chosen(assignments or ())
    if settings:
        _list(values, json_wanted=as_json)
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is there, and no folder: say another one")
    parts = tuple(only or Part)
    fates = write(folder, made(parts, values), force=force)
    stands = any(fate is Fate.IN_THE_WAY for _, fate in fates)
    if as_json:
        as_list(
            [{"file": str(folder / file.name), "part": file.part.value, "fate": fate.value} for file, fate in fates]
        )
    elif stands:
        _refuse(folder, fates)
    else:
        table(("file", "fate"), [(folder / file.name, fate) for file, fate in fates], empty="nothing was wanted")
        typer.echo("\nWhat to do now")
        for line in _steps(folder, parts, values):
            typer.echo(f"  {line}")
    if stands:
        raise typer.Exit(REFUSED)


def _list(values: Mapping[str, str], *, json_wanted: bool) -> None:
    rows = [
        {
            "name": one.name,
            "default": one.default,
            "value": values[one.name],
            "meaning": one.meaning,
            "parts": [part.value for part in one.parts],
        }
        for one in SETTINGS.values()
    ]
    if json_wanted:
        as_list(rows)
        return
    table(
        ("setting", "value", "is for", "says"),
        [(row["name"], row["value"], ", ".join(row["parts"]), row["meaning"]) for row in rows],
        empty="there are none",
        first=("setting", "value", "says"),
    )


def _refuse(folder: Path, fates: Sequence[tuple[File, Fate]]) -> None:
    typer.echo("oncekey: nothing was written: these files are there, and say something else:", err=True)
    for file, fate in fates:
        if fate is Fate.IN_THE_WAY:
            typer.echo(f"  {plain(folder / file.name)}", err=True)
    typer.echo("Say another DIR and compare the two, or --force to replace them.", err=True)


def _steps(folder: Path, parts: Sequence[Part], values: Mapping[str, str]) -> Iterator[str]:
    """What to do with each part, by commands that can be copied."""
    for part in parts:
        match part:
            case Part.ALERTS:
                yield f"alerts      promtool check rules {_typed(folder / ALERTS)}"
                yield "            then name the file under rule_files: of prometheus.yml, and reload Prometheus"
                if values["runbooks"] == SETTINGS["runbooks"].default:
                    yield "            its links to runbooks lead nowhere yet: --set runbooks=https://..."
            case Part.DASHBOARD:
                yield f"dashboard   import {_typed(folder / DASHBOARD)} in Grafana, and choose your Prometheus there"
            case Part.SYSTEMD:
                yield f"systemd     put ONCEKEY_STORE=URL into {values['environment']}, readable by root alone"
                yield f"            cp {_typed(folder / 'systemd')}/* /etc/systemd/system/ && systemctl daemon-reload"
                yield "            systemctl enable --now oncekey-worker"
            case Part.KUBERNETES:
                worker, migrate, *_ = MANIFESTS
                yield f"kubernetes  put {values['secret-key']}=URL into a file that only you read, and remove it after"
                yield f"            kubectl create secret generic {values['secret']} --from-env-file=FILE"
                yield f"            kubectl apply -f {_typed(folder / migrate)}"
                yield "            kubectl wait --for=condition=complete job/oncekey-migrate --timeout=15m"
                yield f"            kubectl apply -f {_typed(folder / worker)}"
                yield f"            with the Prometheus Operator also podmonitor.yaml and {Path(OPERATOR_RULES).name}"
            case Part.RUNBOOKS:
                yield f"runbooks    put {_typed(folder / 'runbooks')} where your people read at night"


def _typed(path: Path) -> str:
    return shlex.quote(str(path))
