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
from oncekey.drivers.sqlite_files import repaired_module
from oncekey.effects import INLINE, LOCAL, OUTBOX, PHASED
from oncekey.frameworks.asgi.enrolment import Enrolment
from oncekey.frameworks.asgi.operation import Operation, SyncOperation
from oncekey.frameworks.asgi.resuming import resumed_as
from oncekey.once import SINGLE_TENANT, Once
from oncekey.resolvers import Declined, Executed, Question, Sighting, Undecided, Unexecuted
from oncekey.topics import Message, Reply

__version__ = "0.1.0"

__all__ = [
    "INLINE",
    "LOCAL",
    "OUTBOX",
    "PHASED",
    "SINGLE_TENANT",
    "ConfigurationError",
    "Declined",
    "Effects",
    "Enrolment",
    "Executed",
    "LeaseLostError",
    "Message",
    "NotExecuted",
    "Once",
    "OncekeyError",
    "Operation",
    "Policy",
    "Question",
    "Record",
    "Rejected",
    "Reply",
    "SchemaError",
    "Selection",
    "Sighting",
    "State",
    "StoreError",
    "StoreUnavailableError",
    "StoredResponse",
    "SyncOperation",
    "Undecided",
    "Unexecuted",
    "__version__",
    "lifetime",
    "repaired_module",
    "resumed_as",
]
