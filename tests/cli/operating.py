"""Typing operators' commands in this process, which is quicker than starting one for each."""

from __future__ import annotations

import json
import sys
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from oncekey.cli.app import make_app
from oncekey.core.errors import OncekeyError
from oncekey.core.scope import scope_of

KEY = "order-2026-0000-4711-key"
SCOPE = scope_of("-", "acme")


def oncekey(*arguments: str) -> Result:
    """What the command says, with our own errors as `main` shows them."""
    result = CliRunner().invoke(make_app(), list(arguments), env={"NO_COLOR": "1", "COLUMNS": "200"})
    if isinstance(result.exception, OncekeyError):
        result.exit_code = 2
        result.stderr_bytes = f"oncekey: {result.exception}\n".encode()
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert sys.stdout is not None
    return result


def refused(*arguments: str) -> dict[str, Any]:
    """A refusal, as programs read it."""
    result = oncekey(*arguments, "--json")
    assert result.exit_code == 1, result.output
    said = json.loads(result.stdout)
    assert set(said) == {"changed", "why", "possible"}
    assert said["changed"] is False
    return said
