"""The program `oncekey-client`: it needs typer, and prints how to install it."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the program."""
    if find_spec("typer") is None:
        sys.stderr.write("oncekey-client needs another package: pip install 'oncekey-client[cli]'\n")
        raise SystemExit(2)
    from oncekey_client.command import run  # noqa: PLC0415  (it imports typer)

    run()


if __name__ == "__main__":
    main()
