"""What served applications load of oncekey, and what their imports cost: `python -m tools.request_path`.

Each application runs in its own process on a private PostgreSQL and serves a new key, a replay, a mismatch and a
duplicate in flight. Processor time is the median of all rounds, without that of a bare interpreter, next to
`import fastapi`. `--source` names the `src` folder of another checkout, to compare two versions.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
APPLICATIONS: Final = ("fastapi_local", "fastapi_phased", "flask_local", "django_local")
IMPORTED: Final = {
    "python": "pass",
    "import fastapi": "import fastapi",
    "import fastapi; from oncekey import Once": "import fastapi; from oncekey import Once",
    "import fastapi, and a LOCAL application": (
        "from harness.slices.__main__ import fastapi_local; fastapi_local('postgresql+asyncpg://nobody@localhost/none')"
    ),
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    for line in (*_loaded(chosen.source.resolve()), *_costs(chosen.source.resolve(), chosen.rounds)):
        sys.stdout.write(f"{line}\n")


def _loaded(source: Path) -> Iterator[str]:
    sys.path.insert(0, str(ROOT / "tests"))
    from harness.pages import generator  # noqa: PLC0415  (of the tests)
    from harness.postgres import PostgresServer  # noqa: PLC0415
    from harness.slices import seen_by  # noqa: PLC0415

    count = generator().request_path
    yield f"{'application':<44}{'modules':>8}{'lines':>8}{'code':>8}{'imports in requests':>21}"
    with PostgresServer() as server:
        for name in APPLICATIONS:
            seen = seen_by(name, server.create_database(name), source=source)
            paths = [count.path_of(module, source) for module in seen.after]
            lines, code = sum(map(count.lines_of, paths)), sum(map(count.code_lines_of, paths))
            yield f"{name:<44}{len(paths):>8}{lines:>8}{code:>8}{len(seen.imports):>21}"


def _costs(source: Path, rounds: int) -> Iterator[str]:
    took: dict[str, list[float]] = {name: [] for name in IMPORTED}
    for _ in range(rounds + 1):  # the first one compiles
        for name, script in IMPORTED.items():
            took[name].append(_processor_time(script, source))
    bare = statistics.median(took.pop("python")[1:])
    yield f"{'processor time':<44}{'ms':>8}"
    for name, times in took.items():
        yield f"{name:<44}{(statistics.median(times[1:]) - bare) * 1000:>8.0f}"


def _processor_time(script: str, source: Path) -> float:
    path = os.pathsep.join(map(str, (source, ROOT / "tests")))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], check=True, env=environ)  # noqa: S603  (a script of ours)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
