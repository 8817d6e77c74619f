"""What `oncekey doctor` asks a database about itself: the statements of `doctor.sql`, and the columns of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

POSTGRES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "diagnostic_clock": ("now",),
        "diagnostic_indexes": ("name", "on_table", "valid", "scans", "rows"),
        "diagnostic_tables": ("name", "live", "dead", "bytes", "last_autovacuum"),
        "diagnostic_sessions": ("idle", "longest_idle", "oldest_transaction", "oldest_xmin", "hidden"),
        "diagnostic_holders": ("prepared", "slot_xmin"),
        "diagnostic_settings": ("name", "value"),
        "diagnostic_ttl": ("shortest_ttl", "longest_call"),
        "diagnostic_rows": ("name", "records"),
    }
)

SQLITE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "diagnostic_clock": ("now",),
        "diagnostic_indexes": ("name", "on_table"),
        "diagnostic_file": ("version", "path"),
        "diagnostic_journal": ("journal_mode",),
        "diagnostic_ttl": ("shortest_ttl", "longest_call"),
    }
)

MARIADB: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "diagnostic_clock": ("now",),
        "diagnostic_indexes": ("name", "on_table"),
        "diagnostic_server": ("Variable_name", "Value"),
        "diagnostic_cluster": ("Variable_name", "Value"),
        "diagnostic_ttl": ("shortest_ttl", "longest_call"),
    }
)
