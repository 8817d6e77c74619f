"""`oncekey torture` for long, on a private PostgreSQL of every version, a MariaDB, a MySQL and a SQLite file.

    python tests/soak/torture_soak.py --seconds 300

`tests/torture` runs it for a few seconds each.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.mariadb import MariadbInstallation, MariadbServer, MysqlInstallation
from harness.postgres import PostgresServer, installations

TORTURE = (sys.executable, "-c", "from oncekey.cli import main; main()", "torture")


def torture(store: str, seconds: int, seed: int) -> bool:
    """Torture one store; whether nothing was done twice, lost or broken."""
    words = [*TORTURE, "--store", store, "--seconds", str(seconds), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(words, cwd=folder, check=False).returncode == 0


def main() -> None:
    """Torture all of them, also after one that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    failed = []
    for installation in installations():
        with PostgresServer(installation) as server:
            if not torture(server.create_database("torture"), options.seconds, options.seed):
                failed.append(str(installation))
    for kind in (MariadbInstallation, MysqlInstallation):
        with MariadbServer(kind=kind) as mariadb:
            if not torture(mariadb.create_database("torture"), options.seconds, options.seed):
                failed.append(kind.name)
    if not torture("sqlite:///torture.db", options.seconds, options.seed):
        failed.append("SQLite")
    raise SystemExit(f"{', '.join(failed)}: see above, seed {options.seed}" if failed else 0)


if __name__ == "__main__":
    main()
