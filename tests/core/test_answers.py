"""Refusals, replays and marks, as the bytes that a client gets."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import product
from uuid import UUID

import pytest

from core.records import an_intent
from harness.each import each
from oncekey.core.answers import LONGEST_WAIT, Answer, accepted_form, marks, refuse, replay, retry_after
from oncekey.core.model import (
    HOUR,
    SECOND,
    Code,
    Effects,
    EntryKind,
    MemoEntry,
    Outcome,
    Record,
    RecordId,
    Recovery,
    Refuse,
    Replay,
    State,
    StoredResponse,
)
from oncekey.core.not_run import error_of
from oncekey.core.policy import ErrorFormat, Flavor, InProgress, Policy
from oncekey.core.problems import PROBLEMS

KEY = "0f9d1c6e-4b7a-4f0e-9d55-2f6a1f2b3c4d"
ECHO = b'"0f9d1c6e-4b7a-4f0e-9d55-2f6a1f2b3c4d"'
FINGERPRINT = "f1" * 32
NOW = 1_767_225_600 * SECOND  # 2026-01-01 00:00:00
STORED = StoredResponse(
    201,
    ((b"content-type", b"application/json"), (b"location", b"/orders/7"), (b"etag", b'"v1"')),
    b'{"b":1e2,"a":"\\u0000"}',
)

RECORD = Record(
    id=RecordId("acme", KEY),
    incarnation=UUID(int=1),
    operation="create_order",
    effects=Effects.LOCAL,
    recovery=Recovery.RETRY,
    method="POST",
    path="/orders",
    fingerprint=FINGERPRINT,
    seed=b"\x00" * 32,
    state=State.COMPLETED,
    outcome=Outcome.SUCCESS,
    entered=True,
    fence=1,
    version=1,
    owner=None,
    lease_until=None,
    deadline=NOW + HOUR,
    call_timeout=30 * SECOND,
    ttl=24 * HOUR,
    attempts=1,
    recovery_point="started",
    memo=(),
    intent=None,
    response=STORED,
    last_error=None,
    reconcile_after=None,
    reconcile_tries=0,
    created_at=NOW,
    last_run_at=NOW,
    finished_at=NOW,
    expires_at=NOW + 24 * HOUR + 999_999,
)


def values(answer: Answer, name: bytes) -> list[bytes]:
    return [value for field, value in answer.headers if field == name]


def value(answer: Answer, name: bytes) -> bytes:
    (only,) = values(answer, name)
    return only


def record(**changes: object) -> Record:
    return replace(RECORD, **changes)


ACCEPTED = (
    {"state": State.PENDING},
    {"state": State.IN_PROGRESS, "intent": an_intent()},
    {"state": State.IN_PROGRESS, "memo": (MemoEntry("charge", EntryKind.CALL, "{}"),)},
)
"""A parcel that waits, one whose call is being made, and one whose result is stored."""


class TestEveryRefusal:
    CASES = tuple(product(Code, ErrorFormat, Flavor))

    # R99, R232, RFC 9457: the status member equals the status
    @each(("code", "shape", "flavor"), CASES)
    def test_status_body_and_type_agree(self, code, shape, flavor):
        answer = refuse(Refuse(code), Policy(error_format=shape, flavor=flavor))
        body = json.loads(answer.body)
        assert answer.status == PROBLEMS[code].status_in(flavor)
        assert value(answer, b"content-length") == b"%d" % len(answer.body)
        if shape is ErrorFormat.PROBLEM:
            assert value(answer, b"content-type") == b"application/problem+json"
            assert (body["status"], body["code"]) == (answer.status, code.value)
        else:
            assert value(answer, b"content-type") == b"application/json"

    # R11: each problem has its own place in the documentation
    @each("code", Code)
    def test_links_to_its_documentation(self, code):
        answer = refuse(Refuse(code), Policy(docs_url="https://api.example.com/docs"))
        place = b"https://api.example.com/docs#" + PROBLEMS[code].slug.encode()
        assert value(answer, b"link") == b'<%s>; rel="describedby"; type="text/html"' % place

    # R230: Stripe's clients obey this header before they look at the status
    @each("code", Code)
    def test_stripe_flavor_sends_stripe_should_retry(self, code):
        said = value(refuse(Refuse(code), Policy(flavor="stripe")), b"stripe-should-retry")
        assert said == (b"true" if PROBLEMS[code].retryable else b"false")
        assert values(refuse(Refuse(code), Policy()), b"stripe-should-retry") == []

    # R230: a stored 409 or 5xx is what such a client would send again for ever
    @pytest.mark.parametrize(("status", "said"), [(201, []), (402, []), (409, [b"false"]), (500, [b"false"])])
    def test_stripe_flavor_sends_stripe_should_retry_on_replays(self, status, said):
        stored = record(response=StoredResponse(status, (), b"{}"))
        assert values(replay(Replay(stored, NOW), Policy(flavor="stripe")), b"stripe-should-retry") == said
        assert values(replay(Replay(stored, NOW), Policy()), b"stripe-should-retry") == []

    @each("code", Code)
    def test_is_not_cached(self, code):
        assert value(refuse(Refuse(code), Policy()), b"cache-control") == b"no-store"

    # R42, R195
    @each(("code", "shape", "flavor"), CASES)
    def test_keeps_key_fingerprint_and_scope_out_of_the_body(self, code, shape, flavor):
        answer = refuse(
            Refuse(code, record=RECORD),
            Policy(error_format=shape, flavor=flavor),
            echo=ECHO,
            status_url=f"/idempotency-keys/{KEY}",
            fault_id="f" * 32,
            trace_id="t",
        )
        for private in (KEY, FINGERPRINT, "acme", "/orders"):
            assert private.encode() not in answer.body

    # R42
    @each("code", Code)
    def test_keeps_the_fingerprint_out_of_the_headers(self, code):
        answer = refuse(Refuse(code, record=RECORD), Policy(), echo=ECHO)
        assert all(FINGERPRINT.encode() not in text for _, text in answer.headers)

    @each("code", Code)
    def test_header_names_are_lower_case_and_come_once(self, code):
        answer = refuse(Refuse(code, retry_after=3), Policy(on_unknown=202), echo=ECHO, status_url="/s")
        names = [name for name, _ in answer.headers]
        assert names == [name.lower() for name in names]
        assert len(set(names)) == len(names)

    # R17
    def test_echoes_the_key_as_it_was_received(self):
        assert value(refuse(Refuse(Code.IN_PROGRESS), Policy(), echo=ECHO), b"idempotency-key") == ECHO
        assert values(refuse(Refuse(Code.KEY_MISSING), Policy()), b"idempotency-key") == []

    def test_is_not_marked_as_a_replay(self):
        assert values(refuse(Refuse(Code.KEY_REUSED), Policy(), echo=ECHO), b"idempotent-replayed") == []

    def test_uses_the_detail_of_the_refusal(self):
        answer = refuse(Refuse(Code.KEY_MALFORMED, "Two lines."), Policy())
        assert json.loads(answer.body)["detail"] == "Two lines."

    # R232
    def test_hands_ids_to_the_fault_envelope(self):
        answer = refuse(
            Refuse(Code.KEY_MISSING),
            Policy(error_format=ErrorFormat.FAULT),
            fault_id="abc-123",
            trace_id="xyz-456",
        )
        fault = json.loads(answer.body)["fault"]
        assert (fault["faultId"], fault["traceId"]) == ("abc-123", "xyz-456")


class TestInProgress:
    # R79, R80
    def test_is_a_conflict_with_a_time_to_retry(self):
        answer = refuse(Refuse(Code.IN_PROGRESS, retry_after=4), Policy(), status_url="/s")
        assert answer.status == 409
        assert json.loads(answer.body)["code"] == "idempotency_key_in_progress"
        assert value(answer, b"retry-after") == b"4"
        assert values(answer, b"location") == []

    # R80: always there, never 0
    @pytest.mark.parametrize("given", [None, 0, -3, 1])
    def test_always_sends_retry_after(self, given):
        assert value(refuse(Refuse(Code.IN_PROGRESS, retry_after=given), Policy()), b"retry-after") == b"1"

    # R81
    def test_can_be_accepted(self):
        policy = Policy(on_in_progress=InProgress.ACCEPTED)
        answer = refuse(Refuse(Code.IN_PROGRESS, retry_after=2), policy, status_url="/idempotency-keys/k")
        assert answer.status == 202
        assert value(answer, b"location") == b"/idempotency-keys/k"
        assert value(answer, b"retry-after") == b"2"
        assert json.loads(answer.body)["status"] == 202

    # R82: the wait is over, and the first is still running
    def test_ends_in_a_conflict_when_waiting_did_not_help(self):
        assert refuse(Refuse(Code.IN_PROGRESS), Policy(on_in_progress=InProgress.WAIT)).status == 409

    # R83, C5: the first caller was told 202, so is the second
    @pytest.mark.parametrize("changes", ACCEPTED)
    def test_of_deferred_work_is_accepted_in_every_mode(self, changes):
        refusal = Refuse(Code.IN_PROGRESS, record=record(effects=Effects.OUTBOX, response=None, **changes))
        assert {refuse(refusal, Policy(on_in_progress=mode)).status for mode in InProgress} == {202}

    # O5: a claim commits nothing, so an OUTBOX request that only has one is not accepted
    @pytest.mark.parametrize("mode", [InProgress.CONFLICT, InProgress.WAIT])
    def test_of_an_outbox_claim_is_a_conflict(self, mode):
        seen = record(effects=Effects.OUTBOX, state=State.IN_PROGRESS, response=None)
        assert refuse(Refuse(Code.IN_PROGRESS, record=seen), Policy(on_in_progress=mode)).status == 409
        assert not error_of(Refuse(Code.IN_PROGRESS, record=seen), Policy(), "pay").accepted

    @pytest.mark.parametrize("changes", ACCEPTED)
    def test_of_deferred_work_is_the_handlers_own_response(self, changes):
        kept = accepted_form(((b"content-type", b"text/plain"), (b"location", b"/transfers/7")), b"on its way")
        refusal = Refuse(
            Code.IN_PROGRESS, retry_after=3, record=record(effects=Effects.OUTBOX, request=kept, **changes)
        )
        answer = refuse(refusal, Policy(), echo=b"k", status_url="/idempotency-keys/k")
        assert (answer.status, answer.body) == (202, b"on its way")
        assert value(answer, b"content-type") == b"text/plain"
        assert value(answer, b"content-length") == b"10"
        assert value(answer, b"location") == b"/idempotency-keys/k"
        assert value(answer, b"retry-after") == b"3"
        assert value(answer, b"cache-control") == b"no-store"
        assert value(answer, b"idempotency-key") == b"k"
        assert value(refuse(refusal, Policy()), b"location") == b"/transfers/7"

    @each("shape", ErrorFormat)
    @each("flavor", Flavor)
    @each("changes", ACCEPTED)
    def test_of_deferred_work_is_a_state_and_a_link_by_default(self, shape, flavor, changes):
        refusal = Refuse(Code.IN_PROGRESS, record=record(effects=Effects.OUTBOX, **changes))
        policy = Policy(error_format=shape, flavor=flavor)
        answer = refuse(refusal, policy, status_url="/idempotency-keys/k")
        assert json.loads(answer.body) == {"state": "pending", "status_url": "/idempotency-keys/k"}
        assert value(answer, b"content-type") == b"application/json"
        assert json.loads(refuse(refusal, policy).body) == {"state": "pending"}

    @pytest.mark.parametrize("effects", [Effects.LOCAL, Effects.PHASED, Effects.INLINE])
    def test_of_other_work_is_a_conflict(self, effects):
        assert refuse(Refuse(Code.IN_PROGRESS, record=record(effects=effects)), Policy()).status == 409

    @each("code", [code for code in Code if code is not Code.IN_PROGRESS])
    def test_accepted_mode_does_not_affect_other_codes(self, code):
        policy = Policy(on_in_progress=InProgress.ACCEPTED)
        assert refuse(Refuse(code, record=record(effects=Effects.OUTBOX)), policy).status != 202


class TestOutcomeUnknown:
    # R85
    @pytest.mark.parametrize("status", [409, 202, 503])
    def test_status_is_configurable_and_code_is_fixed(self, status):
        answer = refuse(Refuse(Code.OUTCOME_UNKNOWN), Policy(on_unknown=status), status_url="/s")
        body = json.loads(answer.body)
        assert (answer.status, body["status"]) == (status, status)
        assert body["code"] == "idempotency_outcome_unknown"
        assert body["type"].endswith(":outcome-unknown")
        assert value(answer, b"location") == b"/s"

    # R85
    def test_sends_retry_after_until_the_next_resolution(self):
        assert value(refuse(Refuse(Code.OUTCOME_UNKNOWN), Policy()), b"retry-after") == b"30"
        known = refuse(Refuse(Code.OUTCOME_UNKNOWN, retry_after=7), Policy())
        assert value(known, b"retry-after") == b"7"
        odd = Policy().override(reconcile_interval=0.2)
        assert value(refuse(Refuse(Code.OUTCOME_UNKNOWN), odd), b"retry-after") == b"1"

    # R85, R99
    def test_type_and_code_differ_from_in_progress(self):
        running, unknown = (
            json.loads(refuse(Refuse(code), Policy()).body) for code in (Code.IN_PROGRESS, Code.OUTCOME_UNKNOWN)
        )
        assert running["status"] == unknown["status"] == 409
        assert running["type"] != unknown["type"]
        assert running["code"] != unknown["code"]


# R110
def test_an_unavailable_store_is_503_with_a_time_to_retry():
    answer = refuse(Refuse(Code.STORE_UNAVAILABLE), Policy())
    assert answer.status == 503
    assert value(answer, b"retry-after") == b"1"


# C7, A4: a Retry-After would invite deployed clients to try again what cannot change
@pytest.mark.parametrize("code", [code for code, problem in PROBLEMS.items() if not problem.waiting_helps])
def test_final_refusals_have_no_retry_after(code):
    assert values(refuse(Refuse(code, retry_after=9), Policy()), b"retry-after") == []


class TestReplay:
    # R87, R88, R89, R90, R92
    @pytest.mark.parametrize("schema_version", [0, 1, 7])
    def test_returns_the_stored_status_body_and_headers(self, schema_version):
        stored = replace(STORED, schema_version=schema_version)
        answer = replay(Replay(record(response=stored), NOW), Policy(), echo=ECHO)
        assert (answer.status, answer.body) == (201, STORED.body)
        assert answer.headers[: len(STORED.headers)] == STORED.headers

    # R91
    def test_replays_a_stored_failure(self):
        declined = StoredResponse(402, ((b"content-type", b"application/json"),), b'{"error":"declined"}')
        answer = replay(Replay(record(response=declined, outcome=Outcome.FAILURE), NOW), Policy())
        assert (answer.status, answer.body) == (402, declined.body)

    # R98
    def test_is_marked(self):
        assert value(replay(Replay(RECORD, NOW), Policy()), b"idempotent-replayed") == b"true"

    # R17
    @pytest.mark.parametrize("echo", [ECHO, KEY.encode()])
    def test_echoes_the_key_header_of_this_request(self, echo):
        assert value(replay(Replay(RECORD, NOW), Policy(), echo=echo), b"idempotency-key") == echo

    # R164: parses, and equals the row to the second
    def test_announces_the_expiry(self):
        text = value(replay(Replay(RECORD, NOW), Policy()), b"idempotency-key-expires")
        assert text == b"Fri, 02 Jan 2026 00:00:00 GMT"
        assert parsedate_to_datetime(text.decode()) == datetime(2026, 1, 2, tzinfo=UTC)

    def test_marker_header_names_are_configurable(self):
        policy = Policy(replayed_header="X-Replayed", expires_header="X-Expires")
        names = {name for name, _ in replay(Replay(RECORD, NOW), policy).headers}
        assert {b"x-replayed", b"x-expires"} <= names
        assert not {b"idempotent-replayed", b"idempotency-key-expires"} & names

    def test_has_the_length_of_its_body(self):
        assert value(replay(Replay(RECORD, NOW), Policy()), b"content-length") == b"%d" % len(STORED.body)
        empty = record(response=StoredResponse(201, (), b""))
        assert value(replay(Replay(empty, NOW), Policy()), b"content-length") == b"0"

    # RFC 9110, 8.6
    @pytest.mark.parametrize("status", [204, 304])
    def test_without_content_has_no_length(self, status):
        answer = replay(Replay(record(response=StoredResponse(status, (), b"")), NOW), Policy())
        assert values(answer, b"content-length") == []

    def test_sends_no_store_unless_the_response_set_cache_control(self):
        assert value(replay(Replay(RECORD, NOW), Policy()), b"cache-control") == b"no-store"
        own = StoredResponse(201, ((b"cache-control", b"private, max-age=5"),), b"x")
        assert value(replay(Replay(record(response=own), NOW), Policy()), b"cache-control") == b"private, max-age=5"

    def test_repeated_headers_stay_repeated(self):
        twice = StoredResponse(200, ((b"link", b"<a>"), (b"link", b"<b>")), b"x")
        assert values(replay(Replay(record(response=twice), NOW), Policy()), b"link") == [b"<a>", b"<b>"]

    # R96: any number of times
    def test_is_the_same_every_time(self):
        answers = {replay(Replay(RECORD, NOW), Policy(), echo=ECHO) for _ in range(3)}
        assert len(answers) == 1


class TestTombstone:
    """A4, F42, R97: done, its body not kept."""

    TOMBSTONE = StoredResponse(201, ((b"location", b"/exports/9"),), None)

    @pytest.fixture
    def answer(self) -> Answer:
        return replay(Replay(record(response=self.TOMBSTONE), NOW), Policy(), echo=ECHO, status_url="/s")

    def test_returns_409_response_not_stored(self, answer):
        body = json.loads(answer.body)
        assert (answer.status, body["status"], body["code"]) == (409, 409, "idempotency_response_not_stored")
        assert value(answer, b"content-type") == b"application/problem+json"
        assert value(answer, b"content-length") == b"%d" % len(answer.body)

    def test_is_marked_as_replay_without_retry_after(self, answer):
        assert value(answer, b"idempotent-replayed") == b"true"
        assert values(answer, b"retry-after") == []

    def test_sends_the_stored_location(self, answer):
        assert value(answer, b"location") == b"/exports/9"

    def test_is_marked_like_every_replay(self, answer):
        assert value(answer, b"idempotency-key") == ECHO
        assert value(answer, b"idempotency-key-expires") == b"Fri, 02 Jan 2026 00:00:00 GMT"
        assert value(answer, b"link").endswith(b'rel="describedby"; type="text/html"')

    @pytest.mark.parametrize("stored", [StoredResponse(200, (), None), None])
    def test_without_location_links_to_the_status_resource(self, stored):
        answer = replay(Replay(record(response=stored), NOW), Policy(), status_url="/idempotency-keys/k")
        assert answer.status == 409
        assert value(answer, b"location") == b"/idempotency-keys/k"
        nowhere = replay(Replay(record(response=stored), NOW), Policy())
        assert values(nowhere, b"location") == []


class TestMarks:
    # R17, R98, R164: on a first response there is no replay marker
    def test_first_response_gets_key_and_expiry_headers(self):
        assert marks(Policy(), echo=ECHO, expires_at=NOW) == (
            (b"idempotency-key", ECHO),
            (b"idempotency-key-expires", b"Thu, 01 Jan 2026 00:00:00 GMT"),
        )

    def test_omits_headers_without_a_value(self):
        assert marks(Policy(), echo=None, expires_at=None) == ()

    # R196: an echo must not begin another header
    @pytest.mark.parametrize("bad", [b"a\r\nset-cookie: x=1", b"a\x00b", b"a\nb", "schlüssel".encode(), b""])
    def test_never_echoes_unprintable_keys(self, bad):
        assert marks(Policy(), echo=bad, expires_at=None) == ()

    # R164
    @pytest.mark.parametrize("seconds", [0, 86_399, 951_782_400, 1_709_164_800, 4_102_444_799, 253_402_300_799])
    def test_write_an_http_date(self, seconds):
        ((_, text),) = marks(Policy(), echo=None, expires_at=seconds * SECOND + 999_999)
        assert parsedate_to_datetime(text.decode()).timestamp() == seconds
        assert len(text) == 29


# R196: the key is part of the status resource's address
def test_a_status_url_cannot_break_out_of_its_header():
    answer = refuse(Refuse(Code.OUTCOME_UNKNOWN), Policy(), status_url="/idempotency-keys/a b\r\nx: y%2F?tenant=ü")
    assert value(answer, b"location") == b"/idempotency-keys/a%20b%0D%0Ax:%20y%2F?tenant=%C3%BC"


class TestRetryAfter:
    # R80: an integer, at least 1, at most what is left of the lease
    @each("left", [-5 * SECOND, 0, 1, SECOND - 1, SECOND, SECOND + 1, 10 * SECOND, 300 * SECOND])
    @each("running", [0, 1, SECOND, 5 * SECOND, 3600 * SECOND])
    def test_stays_within_the_lease(self, left, running):
        seconds = retry_after(left, running_for=running)
        assert isinstance(seconds, int)
        assert 1 <= seconds <= max(1, -(-left // SECOND))

    def test_grows_with_the_time_that_was_already_needed(self):
        advice = [retry_after(300 * SECOND, running_for=span * SECOND) for span in (0, 1, 4, 20, 50, 90)]
        assert advice == [1, 1, 4, 20, 50, LONGEST_WAIT]

    def test_rounds_up(self):
        assert retry_after(10 * SECOND, running_for=2 * SECOND + 1) == 3
        assert retry_after(2 * SECOND + 1, running_for=9 * SECOND) == 3
