"""Makes the files of a kit from the settings, and writes them into a folder without losing a file that is there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oncekey.core.errors import ConfigurationError
from oncekey.kit.dashboard import dashboard
from oncekey.kit.settings import Part, filled

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

ALERTS: Final = "prometheus/oncekey-alerts.yaml"
DASHBOARD: Final = "grafana/oncekey-dashboard.json"
UNITS: Final = (
    "systemd/oncekey-worker.service",
    "systemd/oncekey-migrate.service",
    "systemd/oncekey-upkeep.service",
    "systemd/oncekey-upkeep.timer",
    "systemd/oncekey-ledger.service",
    "systemd/oncekey-ledger.timer",
)
MANIFESTS: Final = (
    "kubernetes/worker.yaml",
    "kubernetes/migrate.yaml",
    "kubernetes/podmonitor.yaml",
    "kubernetes/ledger.yaml",
)
OPERATOR_RULES: Final = "kubernetes/prometheusrule.yaml"
_BLANK: Final = re.compile(r"\[\[([a-z.-]+)\]\]")


class Fate(StrEnum):
    """What became of a file."""

    WRITTEN = "written"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    IN_THE_WAY = "in the way"
    """It is there with another content, so nothing was written."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a kit: its place in the kit's folder, and its content."""

    part: Part
    name: str
    content: str


def made(parts: Iterable[Part], values: Mapping[str, str]) -> tuple[File, ...]:
    """The files of some parts. `values` has every setting."""
    wanted = frozenset(parts)
    return tuple(file for file in _all(values) if file.part in wanted)


def _all(values: Mapping[str, str]) -> Iterator[File]:
    fills = filled(values)
    alerts = _filled(ALERTS, fills)
    yield File(Part.ALERTS, ALERTS, alerts)
    yield File(Part.DASHBOARD, DASHBOARD, dashboard(values, command=fills["said"]))
    shut_in = {**fills, "hardening": _template("systemd/hardening.conf").rstrip()}
    for name in UNITS:
        yield File(Part.SYSTEMD, name, _filled(name, shut_in))
    for name in MANIFESTS:
        yield File(Part.KUBERNETES, name, _filled(name, fills))
    yield File(Part.KUBERNETES, OPERATOR_RULES, _filled(OPERATOR_RULES, {**fills, "rules": _rules(alerts)}))
    for page in sorted(runbooks(), key=lambda one: one.name):
        yield File(Part.RUNBOOKS, f"runbooks/{page.name}", page.read_text(encoding="utf-8"))


def _filled(template: str, fills: Mapping[str, str]) -> str:
    return _BLANK.sub(lambda blank: fills[blank[1]], _template(template))


def _template(name: str) -> str:
    return files("oncekey.kit").joinpath("templates", *name.split("/")).read_text(encoding="utf-8")


def _rules(alerts: str) -> str:
    """The rules as the value of a manifest's `spec`; the template has indented the first line."""
    body = alerts[alerts.index("groups:") :].rstrip()
    return "\n".join(f"  {line}".rstrip() for line in body.splitlines()).lstrip()


def runbooks() -> tuple[Traversable, ...]:
    """The runbooks for operators: the copies in the wheel, or in a checkout their originals."""
    shipped: Traversable = files("oncekey.kit").joinpath("runbooks")
    source: Traversable = Path(__file__).parents[3] / "docs" / "runbooks"
    folder = shipped if shipped.is_dir() else source
    return tuple(page for page in folder.iterdir() if page.name.endswith(".md"))


def write(folder: Path, kit: Iterable[File], *, force: bool) -> tuple[tuple[File, Fate], ...]:
    """Put the files into the folder, unless one is in the way: then none is written.

    A file is in the way if it has another content and `force` does not replace it. A reader never sees half a file:
    each is written beside its place, and then moved there.
    """
    fates = tuple((file, _fate(folder / file.name, file.content, force=force)) for file in kit)
    if any(fate is Fate.IN_THE_WAY for _, fate in fates):
        return fates
    for file, fate in fates:
        if fate is not Fate.UNCHANGED:
            _put(folder / file.name, file.content)
    return fates


def _fate(path: Path, content: str, *, force: bool) -> Fate:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return Fate.WRITTEN
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}): nothing was written") from error
    if found == content.encode():
        return Fate.UNCHANGED
    return Fate.REPLACED if force else Fate.IN_THE_WAY


def _put(path: Path, content: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content.encode())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
