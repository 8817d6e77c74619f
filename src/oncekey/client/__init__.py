"""The client: may retry requests, and never makes an operation happen twice.

`oncekey.client.httpx`, `oncekey.client.requests` and `oncekey.client.aiohttp` are the adapters; each needs its own
package. The journal, `oncekey.client.journal`, needs none.
"""

from __future__ import annotations

from oncekey.client.attempts import RetryRules
from oncekey.client.exchange import (
    ClientError,
    JournalError,
    KeyExpiredError,
    KeyReusedError,
    OutcomeUnknownError,
    PersonalKeyWarning,
)
from oncekey.client.journal import Journal
from oncekey.client.profiles import PROFILES, Profile
from oncekey.core.pacing import Backoff

__all__ = [
    "PROFILES",
    "Backoff",
    "ClientError",
    "Journal",
    "JournalError",
    "KeyExpiredError",
    "KeyReusedError",
    "OutcomeUnknownError",
    "PersonalKeyWarning",
    "Profile",
    "RetryRules",
]
