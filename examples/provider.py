"""A payment provider for the examples: it charges once per key, as Stripe does, and keeps a ledger in a file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

LEDGER = Path("provider.db")


def charge(cents: int, *, key: str) -> dict[str, Any]:
    """Charge, or find the charge that was made under this key."""
    with closing(_ledger()) as ledger, ledger:
        ledger.execute("INSERT OR IGNORE INTO charge (key, cents) VALUES (?, ?)", (key, cents))
        number, charged = ledger.execute("SELECT rowid, cents FROM charge WHERE key = ?", (key,)).fetchone()
    return {"id": f"ch_{number}", "cents": charged}


def charges() -> list[tuple[str, int]]:
    """Every charge: what was really taken from customers."""
    with closing(_ledger()) as ledger:
        return ledger.execute("SELECT 'ch_' || rowid, cents FROM charge ORDER BY rowid").fetchall()


def _ledger() -> sqlite3.Connection:
    ledger = sqlite3.connect(LEDGER, timeout=30)
    ledger.execute("CREATE TABLE IF NOT EXISTS charge (key TEXT UNIQUE NOT NULL, cents INTEGER NOT NULL)")
    return ledger
