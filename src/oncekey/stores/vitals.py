"""What `oncekey doctor` asks a database about itself: the statements of `doctor.sql`, and the columns of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

POSTGRES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "vital_clock": ("now",),
        "vital_indexes": ("name", "on_table", "valid", "scans", "rows"),
        "vital_tables": ("name", "live", "dead", "bytes", "last_autovacuum"),
        "vital_sessions": ("idle", "longest_idle", "oldest_transaction", "oldest_xmin", "hidden"),
        "vital_holders": ("prepared", "slot_xmin"),
        "vital_settings": ("name", "value"),
        "vital_ttl": ("shortest_ttl", "longest_call"),
        "vital_rows": ("name", "records"),
    }
)

SQLITE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "vital_clock": ("now",),
        "vital_indexes": ("name", "on_table"),
        "vital_file": ("version", "path"),
        "vital_journal": ("journal_mode",),
        "vital_ttl": ("shortest_ttl", "longest_call"),
    }
)

MARIADB: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "vital_clock": ("now",),
        "vital_indexes": ("name", "on_table"),
        "vital_server": ("Variable_name", "Value"),
        "vital_cluster": ("Variable_name", "Value"),
        "vital_ttl": ("shortest_ttl", "longest_call"),
    }
)
