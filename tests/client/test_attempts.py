"""The retry matrix of standards 8.2, row by row, on the flow alone: no clock, no chance, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from oncekey.core.model import Code
from oncekey.core.policy import Policy
from oncekey.core.problems import PROBLEMS, render
from oncekey_client import ClientConfigurationError
from oncekey_client.attempts import (
    Answered,
    Misused,
    Outcome,
    RetryRules,
    Surroundings,
    Unknown,
    Unsettled,
    attempts,
    drive,
)
from oncekey_client.exchange import Call, Failure, Loss, Reply
from oncekey_client.profiles import ADYEN, AWS, IETF, PAYPAL, SQUARE, STRIPE
from oncekey_client.waits import Backoff

CALL = Call("POST", "http://shop.example/orders", (("Idempotency-Key", '"k"'), ("Authorization", "Bearer t")), b"{}")
EPOCH = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC).timestamp()

REFUSED = Failure(Loss.NOT_SENT, OSError("refused"))
LOST = Failure(Loss.LOST, OSError("reset"))
WRONG_CERTIFICATE = Failure(Loss.HOPELESS, OSError("certificate"))
DONE = Reply(201, (), b'{"id": 1}')


def reply(status: int, body: object = None, **fields: str) -> Reply:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return Reply(status, tuple((name.replace("_", "-"), value) for name, value in fields.items()), content)


def problem(code: Code, **fields: str) -> Reply:
    """A refusal as a oncekey server writes it."""
    status = PROBLEMS[code].status
    return reply(status, render(code, status, Policy()).body, **fields)


@dataclass
class Play:
    """A flow with a scripted server and a clock that only waits move."""

    script: Sequence[Reply | Failure]
    rules: RetryRules = field(default_factory=RetryRules)
    chance: float = 0.0
    sent: list[Call] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def run(self, call: Call = CALL) -> Outcome:
        answers = iter(self.script)

        def send(sent: Call) -> Reply | Failure:
            self.sent.append(sent)
            return next(answers)

        world = Surroundings(
            clock=lambda: sum(self.waits), time=lambda: EPOCH + sum(self.waits), chance=lambda: self.chance
        )
        return drive(attempts(call, self.rules, world), send, self.waits.append)


RETRIED = {
    "connection refused": REFUSED,
    "reset after sending": LOST,
    "408": reply(408),
    "409 with Retry-After": reply(409, Retry_After="1"),
    "409 in progress by its problem": problem(Code.IN_PROGRESS),
    "409 outcome unknown": problem(Code.OUTCOME_UNKNOWN, Retry_After="5"),
    "409 by the title of the draft": reply(409, {"title": "A request is outstanding for this Idempotency-Key"}),
    "409 of Stripe": reply(409, {"error": {"type": "idempotency_error", "code": "idempotency_key_in_use"}}),
    "423": reply(423),
    "425": reply(425),
    "429": reply(429),
    "500": reply(500),
    "500 that says so": reply(500, Stripe_Should_Retry="true"),
    "502": reply(502),
    "503": reply(503),
    "503 of a store that is down": problem(Code.STORE_UNAVAILABLE, Retry_After="1"),
    "504": reply(504),
    "599": reply(599),
    "202 that names a time": reply(202, Retry_After="1"),
    "202 in progress by its code": reply(202, {"code": Code.IN_PROGRESS.value}),
}


@pytest.mark.parametrize("first", RETRIED.values(), ids=RETRIED)
def test_retryable_reply_repeats_the_identical_request(first):
    # R217, R220, R221, R222, R224, C20
    play = Play([first, DONE])
    assert play.run() == Answered(DONE)
    assert play.sent == [CALL, CALL]
    assert len(play.waits) == 1
    assert play.waits[0] > 0


FINAL = {
    **{str(status): reply(status) for status in (200, 201, 204, 301, 302, 303, 304, 402, 412, 501, 505)},
    **{str(status): reply(status) for status in (400, 404, 405, 406, 410, 411, 413, 414, 415, 416, 417, 422)},
    "202 of a business": reply(202, {"status": "queued"}, Location="/jobs/1"),
    "409 of a business": reply(409, {"code": "sold_out"}),
    "400 key missing": problem(Code.KEY_MISSING),
    "400 key malformed": problem(Code.KEY_MALFORMED),
    "409 done, answer not kept": problem(Code.RESPONSE_NOT_STORED),
    "422 validation": reply(422, {"detail": [{"loc": ["body"], "type": "missing"}]}),
    "500 that says so": reply(500, Stripe_Should_Retry="false"),
    "307 to nowhere": reply(307),
    "307 elsewhere": reply(307, Location="http://evil.example/orders"),
    "308 to another scheme": reply(308, Location="https://shop.example/orders"),
    "308 to nonsense": reply(308, Location="http://[/"),
}


@pytest.mark.parametrize("first", FINAL.values(), ids=FINAL)
def test_what_is_final_is_sent_once(first):
    # R219
    play = Play([first])
    assert play.run() == Answered(first)
    assert play.sent == [CALL]
    assert play.waits == []


@pytest.mark.parametrize("status", [202, 401, 408, 409, 422, 429, 500, 503])
def test_a_replayed_answer_is_final_whatever_its_status(status):
    # R227, C32
    stored = reply(status, {"code": Code.IN_PROGRESS.value}, Idempotent_Replayed="true", Retry_After="1")
    assert Play([stored]).run() == Answered(stored)


@pytest.mark.parametrize(
    ("mismatch", "rules"),
    [
        (problem(Code.KEY_REUSED), RetryRules()),
        (reply(422, {"title": "Idempotency-Key is already used"}), RetryRules()),
        (reply(422, {"fault": {"errors": [{"errorCode": "IDEMPOTENCY_CONFLICT"}]}}), RetryRules()),
        (reply(400, {"error": {"type": "idempotency_error", "message": "…"}}), RetryRules(STRIPE)),
        (reply(400, {"errors": [{"code": "IDEMPOTENCY_KEY_REUSED"}]}), RetryRules(SQUARE)),
        # R270, in each of the forms in which its services send it
        (reply(400, {"__type": "IdempotentParameterMismatch"}), RetryRules(AWS)),
        (reply(400, {"__type": "com.amazonaws.ssm#IdempotentParameterMismatch"}), RetryRules(AWS)),
        (reply(400, {"__type": "IdempotentParameterMismatchException"}), RetryRules(AWS)),
        (
            reply(400, {}, X_Amzn_Errortype="IdempotentParameterMismatch:http://internal.amazon.com/coral"),
            RetryRules(AWS),
        ),
        (
            Reply(
                400,
                (),
                b"<Response><Errors><Error><Code>IdempotentParameterMismatch</Code></Error></Errors></Response>",
            ),
            RetryRules(AWS),
        ),
        (reply(422, {"name": "X", "details": [{"issue": "DUPLICATE_REQUEST_ID"}]}), RetryRules(PAYPAL)),
    ],
)
def test_a_mismatch_is_never_sent_again(mismatch, rules):
    # R224
    assert Play([mismatch], rules).run() == Misused(mismatch)


def test_vendor_specific_retry_signals_are_recognised():
    for first in (reply(422, {"errorCode": "704"}), reply(422, Transient_Error="true")):
        assert Play([first, DONE], RetryRules(ADYEN)).run() == Answered(DONE)
        assert Play([first], RetryRules()).run() == Answered(first)
    locked = reply(400, {"error": {"type": "invalid_request_error", "code": "lock_timeout"}})
    assert Play([locked, DONE], RetryRules(STRIPE)).run() == Answered(DONE)


@pytest.mark.parametrize("status", [401, 403, 407])
def test_rejected_credentials_leave_the_operation_unsettled(status):
    assert Play([reply(status)]).run() == Unsettled(reply(status))


def test_rejected_credentials_after_a_lost_reply_are_unknown():
    ended = Play([LOST, reply(401)]).run()
    assert isinstance(ended, Unknown)
    assert ended.last == reply(401)


def test_a_wrong_certificate_is_not_tried_again():
    assert Play([WRONG_CERTIFICATE]).run() == Unsettled(WRONG_CERTIFICATE)


def test_expired_key_response_makes_the_outcome_unknown():
    gone = problem(Code.KEY_EXPIRED)
    assert Play([gone]).run() == Unknown("the key has expired at the server", gone, expired=True)


@pytest.mark.parametrize("last", [LOST, reply(408), reply(500), reply(502), reply(503), reply(504)], ids=str)
def test_outcome_is_unknown_after_the_last_attempt_was_lost(last):
    # R223
    play = Play([last] * 9, RetryRules(attempts=3))
    ended = play.run()
    assert isinstance(ended, Unknown)
    assert ended.last == last
    assert len(play.sent) == 3


@pytest.mark.parametrize(
    "last", [REFUSED, reply(429), reply(423), reply(425), problem(Code.STORE_UNAVAILABLE)], ids=str
)
def test_request_never_executed_is_unsettled_after_the_last_attempt(last):
    assert Play([last] * 9, RetryRules(attempts=3)).run() == Unsettled(last)


def test_lost_reply_stays_unknown_after_later_refused_connections():
    ended = Play([LOST, REFUSED, REFUSED], RetryRules(attempts=3)).run()
    assert isinstance(ended, Unknown)


def test_client_starts_no_wait_that_would_end_after_the_deadline():
    # R222, R223
    play = Play([reply(409, Retry_After="7")] * 99, RetryRules(attempts=2, deadline=30.0))
    ended = play.run()
    assert isinstance(ended, Unknown)
    assert play.waits == [7.0] * 4
    assert len(play.sent) == 5


def test_waiting_for_work_in_progress_does_not_use_up_the_attempts():
    play = Play([*[problem(Code.IN_PROGRESS, Retry_After="1")] * 9, DONE], RetryRules(attempts=1))
    assert play.run() == Answered(DONE)


def test_without_retry_after_there_is_no_tight_loop():
    # R222
    backoff = Backoff(base=1.0, cap=4.0, floor=0.25, longest=60.0)
    play = Play([problem(Code.IN_PROGRESS)] * 999, RetryRules(backoff=backoff, deadline=10.0))
    assert isinstance(play.run(), Unknown)
    assert set(play.waits) == {0.25}
    envelope = Play([LOST] * 9, RetryRules(backoff=backoff, attempts=5), chance=1.0)
    envelope.run()
    assert envelope.waits == [1.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("said", ["30", "Sun, 15 Nov 2026 12:00:30 GMT"])
def test_retry_after_is_honoured_as_seconds_and_as_a_date(said):
    # R222
    play = Play([reply(503, Retry_After=said), DONE], RetryRules(deadline=100.0))
    assert play.run() == Answered(DONE)
    assert play.waits == [30.0]


def test_absurd_waits_are_clamped():
    play = Play([reply(503, Retry_After="86400"), DONE], RetryRules(deadline=100.0))
    assert play.run() == Answered(DONE)
    assert play.waits == [60.0]


def test_redirects_keep_the_request_and_retries_use_the_original_url():
    moved = reply(307, Location="/v2/orders")
    play = Play([moved, LOST, reply(308, Location="http://shop.example:80/v3/orders"), DONE])
    assert play.run() == Answered(DONE)
    assert [sent.url for sent in play.sent] == [
        CALL.url,
        "http://shop.example/v2/orders",
        CALL.url,
        "http://shop.example:80/v3/orders",
    ]
    assert {(sent.method, sent.body, sent.field("Idempotency-Key")) for sent in play.sent} == {("POST", b"{}", '"k"')}


def test_redirects_are_bounded():
    moved = reply(307, Location="/orders")
    play = Play([moved] * 9, RetryRules(redirects=2))
    assert play.run() == Answered(moved)
    assert len(play.sent) == 3


def test_client_polls_the_location_of_a_202_then_repeats_the_request():
    accepted = reply(202, {"code": Code.IN_PROGRESS.value}, Location="/keys/k", Retry_After="2")
    working = reply(200, {"state": "in_progress"}, Retry_After="1")
    play = Play([accepted, working, LOST, reply(503), reply(200, {"state": "completed"}), DONE])
    assert play.run() == Answered(DONE)
    assert [(sent.method, sent.url) for sent in play.sent] == [
        ("POST", CALL.url),
        *[("GET", "http://shop.example/keys/k")] * 4,
        ("POST", CALL.url),
    ]
    look = play.sent[1]
    assert (look.field("Authorization"), look.field("Idempotency-Key"), look.body) == ("Bearer t", None, b"")
    assert play.waits[:2] == [2.0, 1.0]


@pytest.mark.parametrize("body", [{"state": "pending", "status_url": "/keys/k"}, {"transfer": 7}])
def test_client_fetches_the_response_of_a_202_with_its_key(body):
    accepted, key = reply(202, body, Location="/keys/k", Retry_After="1"), IETF.key_of(CALL)
    working = reply(200, {"key": key, "state": "pending"}, Retry_After="1")
    play = Play([accepted, working, reply(200, {"key": key, "state": "completed"}), DONE])
    assert play.run() == Answered(DONE)
    assert [sent.method for sent in play.sent] == ["POST", "GET", "GET", "POST"]


def test_final_page_of_a_polled_job_is_the_response():
    accepted, page = reply(202, Location="/jobs/1", Retry_After="1"), reply(200, {"result": 7})
    assert Play([accepted, reply(202, Retry_After="1"), page]).run() == Answered(page)


def test_credentials_do_not_follow_a_location_to_another_origin():
    accepted = reply(202, Location="http://evil.example/jobs/1", Retry_After="1")
    play = Play([accepted, DONE])
    assert play.run() == Answered(DONE)
    assert play.sent == [CALL, CALL]


def test_polling_ends_with_the_deadline():
    accepted = reply(202, Location="/jobs/1", Retry_After="4")
    play = Play([accepted, *[reply(200, Retry_After="4")] * 99], RetryRules(deadline=10.0))
    assert isinstance(play.run(), Unknown)
    assert play.waits == [4.0, 4.0]


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"deadline": 0.0}, {"deadline": float("inf")}, {"redirects": -1}])
def test_rules_without_bounds_are_refused(wrong):
    # R223
    with pytest.raises(ClientConfigurationError):
        RetryRules(**wrong)
