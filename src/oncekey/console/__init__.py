"""The operators' console in a browser: pending work, the history of each key, and actions.

It needs the extra `oncekey[console]`: Starlette and Jinja2.
"""

from importlib.util import find_spec

from oncekey.core.errors import ConfigurationError

for _package in ("starlette", "jinja2"):
    if find_spec(_package) is None:
        raise ConfigurationError(f"the console needs {_package}: pip install 'oncekey[console]'")

from oncekey.console.access import Operator, Role, Tokens  # noqa: E402
from oncekey.console.app import Console  # noqa: E402
from oncekey.reconcile import Ledger  # noqa: E402

__all__ = ["Console", "Ledger", "Operator", "Role", "Tokens"]
