"""Diagnoses a DynamoDB table: its backups, expiry and write capacity. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.ops.doctor import Finding, Level, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oncekey.core.model import Duration, Instant


def findings(diagnostics: Mapping[str, Rows], now: Instant, lease: Duration) -> Iterator[Finding]:  # noqa: ARG001
    """The service's report."""
    yield from tables([row["reported"] for row in diagnostics["diagnostic_cells"]])


def tables(rows: Rows) -> Iterator[Finding]:
    """Whether DynamoDB keeps records, expires old ones, and has the capacity to write. None: not reported."""
    for table in rows:
        name = table["table"]
        if table["expiry"] is False:
            yield Finding(
                Level.WARNING,
                "dynamodb",
                f"time to live is off on {name}",
                "only the reaper removes expired records, item by item",
                f"aws dynamodb update-time-to-live --table-name {name} "
                "--time-to-live-specification Enabled=true,AttributeName=forget_at",
            )
        if table["recovery"] is False:
            yield Finding(
                Level.WARNING,
                "dynamodb",
                f"point-in-time recovery is off on {name}",
                "a table that is deleted or overwritten by mistake loses every key, and retries execute again",
                f"aws dynamodb update-continuous-backups --table-name {name} "
                "--point-in-time-recovery-specification PointInTimeRecoveryEnabled=true",
            )
        if table["billing"] != "PAY_PER_REQUEST":
            yield Finding(
                Level.NOTE,
                "dynamodb",
                f"{name} has provisioned {table['writes']} writes a second",
                "above that DynamoDB throttles, and requests receive 503; each request takes about three writes",
                "turn on auto scaling, or switch the table to on-demand billing",
            )
        yield Finding(Level.OK, "dynamodb", f"{name} is {table['status'].lower()}, billed as {table['billing']}")
