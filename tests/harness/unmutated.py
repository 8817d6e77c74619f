"""Guards whose mutants no test can tell from the statement, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SHOWN: Final = ("console.sql", "doctor.sql")
"""Files of statements that only show records: nothing is written or answered by what they read."""

UNMUTATED: Final[Mapping[str, str]] = {
    "*: clock.durable = 'on'": "it is always true: it makes PostgreSQL evaluate the setting that makes the commit durable",
}
