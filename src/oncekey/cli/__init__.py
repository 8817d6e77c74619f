"""The command `oncekey`.

Each module of this package with a function `register(app)` is a command, or a group of commands. `app.COMMANDS` lists
it, so that only the module of the command that was typed is imported.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from oncekey.core.errors import OncekeyError


def main() -> None:
    """Run the command in the arguments."""
    if find_spec("typer") is None:
        sys.stderr.write("the oncekey command needs another package: pip install 'oncekey[cli]'\n")
        raise SystemExit(2)
    from oncekey.cli.app import make_app

    try:
        make_app()()
    except OncekeyError as error:
        sys.stderr.write(f"oncekey: {error}\n")
        raise SystemExit(2) from None
