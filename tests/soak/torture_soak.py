"""`oncekey torture` for long, on a private server of every store, one after the other.

    python tests/soak/torture_soak.py --seconds 300 --store redis --store postgresql-18

The table at the end has a row for each store. Stores that share no transaction (Redis, DynamoDB) are tortured by their
PHASED and INLINE routes; what was resumed is counted by rows of the application, so there it is 0. `tests/torture` runs
it for a few seconds each.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.dynamo import CREDENTIALS
from soak.places import choosing, chosen

TORTURE = (sys.executable, "-c", "from oncekey.cli import main; main()", "torture", "--json")
FEWER = ("--servers", "2", "--workers", "1", "--clients", "4")
"""For emulators, which do one request after the other."""
COLUMNS = ("requests", "keys", "crashes", "pauses", "resumed", "unknown", "duplicates", "lost")


def torture(store: str, seconds: int, seed: int, *more: str) -> dict[str, Any]:
    """What torturing one store came to; what is wrong is said at once."""
    words = [*TORTURE, "--store", store, "--seconds", str(seconds), "--seed", str(seed), *more]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(words, cwd=folder, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    told: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {"ok": False}
    return told


def main() -> None:
    """Torture all of them, also after one that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=300)
    choosing(parser)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    results = {}
    for name, opened in chosen(options).items():
        with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as (_, url):
            more = FEWER if name.startswith("dynamodb") else ()
            results[name] = torture(url, options.seconds, options.seed, *more)
    print(f"{options.seconds} seconds, seed {options.seed}")
    print(f"{'store':<20}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'violations':>12}")
    for name, told in results.items():
        row = "".join(f"{told.get(column, '?'):>12}" for column in COLUMNS)
        print(f"{name:<20}{row}{len(told.get('violations', '?')):>12}")
    raise SystemExit(0 if all(told["ok"] for told in results.values()) else 1)


if __name__ == "__main__":
    main()
