"""The command `oncekey`.

Each module of this package that has a function `register(app)` is a command, or a group of commands. `app.COMMANDS`
names it, so that only the module of the command that is typed is imported.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from oncekey.core.errors import OncekeyError


def main() -> None:
    """Run the command that the arguments name."""
    if find_spec("typer") is None:
        sys.stderr.write("the command oncekey needs one more package: pip install 'oncekey[cli]'\n")
        raise SystemExit(2)
    from oncekey.cli.app import make_app

    try:
        make_app()()
    except OncekeyError as error:
        sys.stderr.write(f"oncekey: {error}\n")
        raise SystemExit(2) from None
