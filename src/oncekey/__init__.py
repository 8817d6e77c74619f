"""oncekey: a client may send a state-changing request as often as it likes, and it happens once."""

from oncekey.core.errors import (
    ConfigurationError,
    LeaseLostError,
    NotExecuted,
    OncekeyError,
    Rejected,
    SchemaError,
    StoreError,
    StoreUnavailableError,
)
from oncekey.core.fingerprint import Selection
from oncekey.core.model import Effects, Record, State, StoredResponse
from oncekey.core.policy import Policy, lifetime
from oncekey.effects import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.frameworks.asgi.enrolment import Enrolment
from oncekey.frameworks.asgi.operation import Operation, SyncOperation
from oncekey.frameworks.asgi.resuming import resumed_as
from oncekey.once import SINGLE_TENANT, Once

__version__ = "0.1.0"

__all__ = [
    "INLINE",
    "LOCAL",
    "OUTBOX",
    "PHASED",
    "SINGLE_TENANT",
    "ConfigurationError",
    "Effects",
    "Enrolment",
    "LeaseLostError",
    "NotExecuted",
    "Once",
    "OncekeyError",
    "Operation",
    "Policy",
    "Record",
    "Rejected",
    "SchemaError",
    "Selection",
    "State",
    "StoreError",
    "StoreUnavailableError",
    "StoredResponse",
    "SyncOperation",
    "__version__",
    "lifetime",
    "resumed_as",
]
