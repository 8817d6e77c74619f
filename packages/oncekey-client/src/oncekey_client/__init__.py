"""The client: retries requests without ever executing an operation twice.

`oncekey_client.httpx`, `oncekey_client.requests` and `oncekey_client.aiohttp` are the adapters; each needs its own
package. The journal, `oncekey_client.journal`, needs none. Nothing here imports the library `oncekey`.
"""

from __future__ import annotations

from oncekey_client.attempts import RetryRules
from oncekey_client.exchange import (
    ClientConfigurationError,
    ClientError,
    JournalError,
    PersonalKeyWarning,
    RequestKeyExpiredError,
    RequestKeyReusedError,
    RequestOutcomeUnknownError,
)
from oncekey_client.journal import Journal
from oncekey_client.profiles import PROFILES, Profile
from oncekey_client.waits import Backoff

__all__ = [
    "PROFILES",
    "Backoff",
    "ClientConfigurationError",
    "ClientError",
    "Journal",
    "JournalError",
    "PersonalKeyWarning",
    "Profile",
    "RequestKeyExpiredError",
    "RequestKeyReusedError",
    "RequestOutcomeUnknownError",
    "RetryRules",
]
