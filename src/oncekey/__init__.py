"""oncekey makes state-changing requests safe to retry: a client may send one repeatedly, and it is executed once.

Every public name is imported on first use: `import oncekey` itself loads nothing, so a command or a client does not
load the server's modules. Type checkers and editors read the imports below.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.canonical.fingerprint import Selection
    from oncekey.core.checks import Front
    from oncekey.core.errors import (
        ConfigurationError,
        LeaseLostError,
        NotExecutedError,
        OncekeyError,
        RejectedError,
        SchemaError,
        StoreError,
        StoreUnavailableError,
    )
    from oncekey.core.model import INLINE, LOCAL, OUTBOX, PHASED, Effects, Record, State, StoredResponse
    from oncekey.core.not_run import (
        ExecutionFailedError,
        InProgressError,
        KeyExpiredError,
        KeyReusedError,
        LimitedError,
        NotRunError,
        OutcomeUnknownError,
        ResultNotKeptError,
    )
    from oncekey.core.policy import Policy
    from oncekey.core.resolvers import Executed, NotExecuted, Question, Rejected, Sighting, Undecided
    from oncekey.core.topics import Message, Reply
    from oncekey.core.upkeep import lifetime
    from oncekey.databases.sqlite.files import repaired_module
    from oncekey.engine.enrolment import Enrolment
    from oncekey.engine.operation import Operation
    from oncekey.engine.sync_operation import SyncOperation
    from oncekey.frameworks.inbox import Handling, Receipt
    from oncekey.frameworks.resuming import resumed_as
    from oncekey.once import SINGLE_TENANT, Once

__version__ = "0.9.0"

_PLACES = {
    "oncekey.core.errors": (
        "ConfigurationError",
        "LeaseLostError",
        "NotExecutedError",
        "OncekeyError",
        "RejectedError",
        "SchemaError",
        "StoreError",
        "StoreUnavailableError",
    ),
    "oncekey.canonical.fingerprint": ("Selection",),
    "oncekey.core.checks": ("Front",),
    "oncekey.core.model": ("INLINE", "LOCAL", "OUTBOX", "PHASED", "Effects", "Record", "State", "StoredResponse"),
    "oncekey.core.policy": ("Policy",),
    "oncekey.core.upkeep": ("lifetime",),
    "oncekey.core.not_run": (
        "ExecutionFailedError",
        "InProgressError",
        "KeyExpiredError",
        "KeyReusedError",
        "LimitedError",
        "NotRunError",
        "OutcomeUnknownError",
        "ResultNotKeptError",
    ),
    "oncekey.databases.sqlite.files": ("repaired_module",),
    "oncekey.engine.enrolment": ("Enrolment",),
    "oncekey.engine.operation": ("Operation",),
    "oncekey.engine.sync_operation": ("SyncOperation",),
    "oncekey.frameworks.inbox": ("Handling", "Receipt"),
    "oncekey.frameworks.resuming": ("resumed_as",),
    "oncekey.once": ("SINGLE_TENANT", "Once"),
    "oncekey.core.resolvers": ("Rejected", "Executed", "Question", "Sighting", "Undecided", "NotExecuted"),
    "oncekey.core.topics": ("Message", "Reply"),
}
"""The module of each public name; a test compares it with the imports above."""

_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "INLINE",
    "LOCAL",
    "OUTBOX",
    "PHASED",
    "SINGLE_TENANT",
    "ConfigurationError",
    "Effects",
    "Enrolment",
    "Executed",
    "ExecutionFailedError",
    "Front",
    "Handling",
    "InProgressError",
    "KeyExpiredError",
    "KeyReusedError",
    "LeaseLostError",
    "LimitedError",
    "Message",
    "NotExecuted",
    "NotExecutedError",
    "NotRunError",
    "Once",
    "OncekeyError",
    "Operation",
    "OutcomeUnknownError",
    "Policy",
    "Question",
    "Receipt",
    "Record",
    "Rejected",
    "RejectedError",
    "Reply",
    "ResultNotKeptError",
    "SchemaError",
    "Selection",
    "Sighting",
    "State",
    "StoreError",
    "StoreUnavailableError",
    "StoredResponse",
    "SyncOperation",
    "Undecided",
    "__version__",
    "lifetime",
    "repaired_module",
    "resumed_as",
]


def __getattr__(name: str) -> object:
    place = _PLACE_OF.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  (this module is imported by every command)

    found: object = getattr(import_module(place), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
