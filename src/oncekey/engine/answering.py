"""From verdicts to answers: refusals with their instance and their log line, and replays."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, assert_never
from uuid import uuid4

from oncekey.core import answers
from oncekey.core.keys import key_digest
from oncekey.core.model import Bypass, Code, Proceed, Refuse, Replay

if TYPE_CHECKING:
    from oncekey.core.answers import Answer
    from oncekey.core.model import Claim, Verdict
    from oncekey.core.policy import Policy
    from oncekey.engine.run import Asker, Run

log = logging.getLogger("oncekey")
security = logging.getLogger("oncekey.security")
"""Gets a warning for each misused key: a client has a bug, or an attacker tries a known key with another payload."""


def refusal(
    refused: Refuse,
    policy: Policy,
    *,
    claim: Claim | None = None,
    echo: bytes | None = None,
    status_url: str | None = None,
) -> Answer:
    """The answer to a request that is not executed; its instance stands in the answer and in the log."""
    instance = uuid4()
    log.info("oncekey: refused with %s (instance %s)", refused.code.value, instance)
    if refused.code is Code.KEY_REUSED and claim is not None:
        known = fields_of("key_misuse", claim, instance=str(instance))
        security.warning(
            "oncekey: a key was used for another request of %(operation)s in %(scope)s (digest %(key_digest)s, "
            "instance %(instance)s)",
            known,
            extra={"oncekey": known},
        )
    return answers.refuse(refused, policy, echo=echo, status_url=status_url, fault_id=instance.hex)


def replayed(verdict: Replay, policy: Policy, asker: Asker) -> Answer:
    """The stored answer; only the problem that replaces an answer that was not kept has an instance and a location."""
    stored = verdict.record.response
    if stored is not None and stored.body is not None:
        return answers.replay(verdict, policy, echo=asker.echo)
    return answers.replay(verdict, policy, echo=asker.echo, status_url=asker.status_url, fault_id=uuid4().hex)


def fields_of(event: str, claim: Claim, **more: str) -> dict[str, str]:
    """The fields of a log line about a request: never the key, only its digest."""
    known = {"operation": claim.operation, "scope": claim.id.scope, "key_digest": key_digest(claim.id.key)}
    return {"event": event, **known, **more}


def refused(run: Run, refuse: Refuse) -> Answer:
    """The refusal as the answer to the request of a run."""
    return refusal(refuse, run.policy, claim=run.claim, echo=run.asker.echo, status_url=run.asker.status_url)


def in_doubt(run: Run) -> Answer:
    """503 with the code of an unknown outcome: it may have happened, and the store cannot say so yet."""
    policy = run.policy.override(on_unknown=503)
    unknown = Refuse(Code.OUTCOME_UNKNOWN, retry_after=1)
    return refusal(unknown, policy, echo=run.asker.echo, status_url=run.asker.status_url)


def answer_to(run: Run, verdict: Verdict) -> Answer:
    """The answer that the request of a run gets instead of its handler's."""
    match verdict:
        case Replay():
            return replayed(verdict, run.policy, run.asker)
        case Refuse():
            return refused(run, verdict)
        case Proceed() | Bypass():
            raise AssertionError("an operation that goes on is not answered yet")
        case _:
            assert_never(verdict)
