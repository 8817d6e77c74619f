"""Every code has its problem, and its three shapes keep their promises."""

import json
import re

import pytest

from harness.each import each
from oncekey.core.model import Code
from oncekey.core.policy import ErrorFormat, Flavor, Policy
from oncekey.core.problems import PROBLEMS, documentation_of, render, type_of

STATUSES = {
    Code.KEY_MISSING: 400,
    Code.KEY_MALFORMED: 400,
    Code.BODY_INVALID: 400,
    Code.BODY_LENGTH_MISSING: 411,
    Code.BODY_TOO_LARGE: 413,
    Code.BODY_TOO_SLOW: 408,
    Code.KEY_REUSED: 422,
    Code.IN_PROGRESS: 409,
    Code.OUTCOME_UNKNOWN: 409,
    Code.RESPONSE_NOT_STORED: 409,
    Code.KEY_EXPIRED: 410,
    Code.KEY_NOT_FOUND: 404,
    Code.STORE_UNAVAILABLE: 503,
    Code.RECORD_UNREADABLE: 500,
    Code.EXECUTION_FAILED: 500,
    Code.TIMED_OUT: 408,
    Code.RATE_LIMITED: 429,
    Code.REQUEST_TOO_OLD: 412,
}


# R99
def test_the_catalogue_is_total():
    assert set(PROBLEMS) == set(Code) == set(STATUSES)


# R11, R37, R79, R85, R97, R99, R110
@each(("code", "status"), STATUSES.items())
def test_statuses_of_the_ietf_flavor(code, status):
    assert PROBLEMS[code].status_in(Flavor.IETF) == status


# R37, R230: the flavors differ in one status, and there is no third
@each(("code", "status"), STATUSES.items())
def test_statuses_of_the_stripe_flavor(code, status):
    assert PROBLEMS[code].status_in(Flavor.STRIPE) == (400 if code is Code.KEY_REUSED else status)
    assert set(Flavor) == {Flavor.IETF, Flavor.STRIPE}


# C7: deployed clients retry every 409
def test_a_mismatch_is_never_a_conflict():
    assert 409 not in {PROBLEMS[Code.KEY_REUSED].status_in(flavor) for flavor in Flavor}


# R85, R99
@pytest.mark.parametrize("member", ["slug", "title", "detail", "fault_code"])
def test_no_two_problems_can_be_mistaken(member):
    assert len({getattr(problem, member) for problem in PROBLEMS.values()}) == len(Code)


@each("code", Code)
def test_names_are_fit_for_urls_and_envelopes(code):
    problem = PROBLEMS[code]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", problem.slug)
    assert re.fullmatch(r"IDEMPOTENCY_[A-Z_]+", problem.fault_code)
    assert problem.title
    assert problem.detail.endswith(".")


# A4, R80, R85, R110: what invites a retry says when; nothing else invites one
def test_codes_for_which_waiting_helps():
    waiting = {code for code, problem in PROBLEMS.items() if problem.waiting_helps}
    assert waiting == {Code.IN_PROGRESS, Code.OUTCOME_UNKNOWN, Code.STORE_UNAVAILABLE, Code.RATE_LIMITED}


# R99: a client need not know our codes to know whether sending it again makes sense
def test_codes_that_are_retryable_with_the_same_key():
    retryable = {code for code, problem in PROBLEMS.items() if problem.retryable}
    waiting = {code for code, problem in PROBLEMS.items() if problem.waiting_helps}
    assert retryable == waiting | {Code.EXECUTION_FAILED, Code.BODY_TOO_SLOW}
    assert all(code not in retryable for code in (Code.KEY_REUSED, Code.KEY_EXPIRED, Code.RESPONSE_NOT_STORED))


class TestProblem:
    # R232, RFC 9457 section 3.1
    @each("code", Code)
    def test_problem_document_has_the_documented_members(self, code):
        page = render(code, STATUSES[code], Policy())
        assert page.media_type == b"application/problem+json"
        assert json.loads(page.body) == {
            "type": f"urn:oncekey:problem:{PROBLEMS[code].slug}",
            "title": PROBLEMS[code].title,
            "status": STATUSES[code],
            "detail": PROBLEMS[code].detail,
            "code": code.value,
            "retryable": PROBLEMS[code].retryable,
        }

    # RFC 9457 section 3.1.5: an occurrence has a URI of its own
    def test_fault_id_becomes_the_problem_instance(self):
        said = json.loads(render(Code.KEY_REUSED, 422, Policy(), fault_id="a" * 32).body)
        assert said["instance"] == "urn:uuid:aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"

    # RFC 9457: the member equals the status that is really sent
    @pytest.mark.parametrize("status", [409, 503])
    def test_the_status_member_is_the_status(self, status):
        body = json.loads(render(Code.OUTCOME_UNKNOWN, status, Policy()).body)
        assert body["status"] == status

    def test_a_detail_of_the_occasion_replaces_the_default_and_the_title_stays(self):
        body = json.loads(render(Code.KEY_MALFORMED, 400, Policy(), detail="The key is shorter than 16.").body)
        assert body["detail"] == "The key is shorter than 16."
        assert body["title"] == PROBLEMS[Code.KEY_MALFORMED].title

    # RFC 9457 section 4: extension names begin with a letter and have three or more characters
    @each("flavor", Flavor)
    @each("code", Code)
    def test_extension_members_are_well_named(self, code, flavor):
        members = json.loads(render(code, STATUSES[code], Policy(flavor=flavor)).body)
        assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{2,}", name) for name in members)

    def test_type_and_documentation_urls_are_configurable(self):
        policy = Policy(problem_types="https://api.example.com/problems/", docs_url="https://api.example.com/docs")
        assert type_of(Code.KEY_REUSED, policy) == "https://api.example.com/problems/key-mismatch"
        assert documentation_of(Code.KEY_REUSED, policy) == "https://api.example.com/docs#key-mismatch"

    def test_the_default_type_names_no_host(self):
        assert all(type_of(code, Policy()).startswith("urn:") for code in Code)
        assert "//" not in documentation_of(Code.KEY_MISSING, Policy())

    def test_the_stripe_flavor_adds_the_error_that_its_clients_look_for(self):
        policy = Policy(flavor=Flavor.STRIPE)
        body = json.loads(render(Code.KEY_REUSED, 400, policy).body)
        assert body["error"] == {
            "type": "idempotency_error",
            "code": "idempotency_key_reused_with_different_payload",
            "message": "Keys for idempotent requests can only be used with the same parameters they were first used "
            "with. Try using another key if you meant to execute a different request.",
        }
        busy = json.loads(render(Code.IN_PROGRESS, 409, policy).body)["error"]
        assert busy["code"] == "idempotency_key_in_use"
        assert busy["message"].startswith("There is currently another in-progress request using this Idempotent Key")
        kinds = {code: json.loads(render(code, STATUSES[code], policy).body)["error"]["type"] for code in Code}
        assert set(kinds.values()) == {"idempotency_error", "invalid_request_error", "api_error"}
        assert {code for code, kind in kinds.items() if kind == "api_error"} == {
            code for code, status in STATUSES.items() if status >= 500
        }


class TestFault:
    POLICY = Policy(error_format=ErrorFormat.FAULT)

    # R232, R233: the envelope of the source, its code and its words
    def test_a_mismatch_is_the_published_envelope(self):
        page = render(Code.KEY_REUSED, 422, self.POLICY, detail="anything", fault_id="abc-123", trace_id="xyz-456")
        assert page.media_type == b"application/json"
        assert json.loads(page.body) == {
            "fault": {
                "faultId": "abc-123",
                "traceId": "xyz-456",
                "errors": [
                    {
                        "errorCode": "IDEMPOTENCY_CONFLICT",
                        "description": "An Idempotency-Key may not be reused with a different request body.",
                    }
                ],
            }
        }

    @each("code", [code for code in Code if code is not Code.KEY_REUSED])
    def test_every_other_refusal_has_its_own_code(self, code):
        fault = json.loads(render(code, STATUSES[code], self.POLICY, detail="Says so.").body)["fault"]
        assert fault["errors"] == [{"errorCode": PROBLEMS[code].fault_code, "description": "Says so."}]

    def test_without_a_detail_the_default_is_described(self):
        fault = json.loads(render(Code.KEY_MISSING, 400, self.POLICY).body)["fault"]
        assert fault["errors"][0]["description"] == PROBLEMS[Code.KEY_MISSING].detail


class TestCode:
    # R232, R233
    @pytest.mark.parametrize(
        ("code", "text"),
        [
            (Code.STORE_UNAVAILABLE, "idempotency_store_unavailable"),
            (Code.IN_PROGRESS, "idempotency_key_in_progress"),
            (Code.KEY_REUSED, "idempotency_key_reused_with_different_payload"),
        ],
    )
    def test_code_format_contains_only_the_code(self, code, text):
        page = render(code, STATUSES[code], Policy(error_format=ErrorFormat.CODE), detail="x", fault_id="y")
        assert (page.media_type, page.body) == (b"application/json", b'{"code":"%s"}' % text.encode())


# R81: to be told to wait is no error, so it is neither problem nor fault
@pytest.mark.parametrize("shape", ErrorFormat)
def test_202_response_is_not_a_problem_document(shape):
    page = render(Code.IN_PROGRESS, 202, Policy(error_format=shape))
    assert page.media_type == b"application/json"
    assert json.loads(page.body)["code"] == "idempotency_key_in_progress"
    assert b"fault" not in page.body


@pytest.mark.parametrize("shape", ErrorFormat)
def test_bodies_are_the_same_bytes_every_time(shape):
    policy = Policy(error_format=shape)
    assert render(Code.KEY_REUSED, 422, policy) == render(Code.KEY_REUSED, 422, policy)
