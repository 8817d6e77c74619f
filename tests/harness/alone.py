"""Environments with one distribution and what it declares to need, made of what is installed here: offline.

`make release-check` sets `ONCEKEY_TEST_RELEASE` to the folder of the wheels that it built. The tests then use these,
and pip downloads what they need, as for a user.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECTS: Mapping[str, Path] = {
    "oncekey": ROOT,
    **{path.name: path for path in sorted((ROOT / "packages").iterdir()) if (path / "pyproject.toml").is_file()},
}
"""The distributions of this repository, with the folder of each."""
RELEASE = os.environ.get("ONCEKEY_TEST_RELEASE")
"""The folder of the wheels of a release; None: build them, and stay offline."""


def built(name: str, folder: Path) -> Path:
    """The wheel of one of our distributions."""
    if RELEASE is not None:
        folder = Path(RELEASE).resolve()
        (wheel,) = folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
        return wheel
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=PROJECTS[name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return wheel


def installed(wanted: str, wheels: Mapping[str, Path], folder: Path) -> Path:
    """The folder of the programs of a new environment with `wanted`, such as `oncekey[cli] pytest`, and what it needs.

    Our own distributions come from their wheels. Others are linked from the environment of the tests, so a dependency
    that is not declared cannot be imported.
    """
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    if RELEASE is not None:
        first, *others = wanted.split()
        name, bracket, extras = first.partition("[")
        _pip(programs, "--find-links", RELEASE, f"{wheels[name]}{bracket}{extras}", *others)
        return programs
    (libraries,) = folder.glob("lib/python*/site-packages")
    for name, found in _closure(wanted, wheels).items():
        if name in wheels:
            add(wheels[name], programs)
        else:
            for entry in sorted(_entries(found)):
                place = libraries / entry
                if not place.exists():
                    place.symlink_to(str(found.locate_file(entry)))
    return programs


def requirements(wheel: Path) -> list[Requirement]:
    """What a wheel declares to need, extras included."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [Requirement(line) for line in lines]


def _closure(wanted: str, wheels: Mapping[str, Path]) -> dict[str, Distribution]:
    seen: set[tuple[str, str]] = set()
    found: dict[str, Distribution] = {}
    left = [Requirement(one) for one in wanted.split()]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        found[name] = distribution(name)
        extras = {"", *one.extras} - {extra for by, extra in seen if by == name}
        seen |= {(name, extra) for extra in extras}
        needs = requirements(wheels[name]) if name in wheels else map(Requirement, found[name].requires or ())
        left += [need for need in needs for extra in extras if applies(need, extra)]
    return found


def applies(need: Requirement, extra: str = "") -> bool:
    """Whether an installation with this extra needs it, or one without extras."""
    return need.marker is None or need.marker.evaluate({"extra": extra})


def _entries(found: Distribution) -> Iterator[str]:
    yield from {path.parts[0] for path in found.files or () if path.parts[0] not in {"..", "__pycache__"}}


def add(wheel: Path, programs: Path) -> None:
    """Install a wheel into an environment, without what it needs."""
    _pip(programs, "--no-index", "--no-deps", str(wheel))


def _pip(programs: Path, *wanted: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check", "install"]
    done = subprocess.run([*pip, "--quiet", *wanted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
