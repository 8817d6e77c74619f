"""From request parts to a claim: what is refused, in which order, and what a claim says."""

from __future__ import annotations

import json
import os
from uuid import UUID

import pytest

from oncekey.canonical.digests import Seeds
from oncekey.canonical.fingerprint import Fingerprints, Request, Selection
from oncekey.canonical.whole import fingerprint
from oncekey.core.errors import BodyInvalidError, ConfigurationError
from oncekey.core.keys import HeaderSyntax, KeyFormat
from oncekey.core.model import Claim, Code, Effects, RecordId, Recovery, Refuse
from oncekey.core.policy import KeyCheck, Policy, micros
from oncekey.core.scope import BindTo, bound_scope
from oncekey.engine.claiming import PROCESS, Caller, Parts, chosen_of, claim_of, fingerprint_for
from oncekey.engine.enrolment import Enrolment
from oncekey.engine.kept_request import about_of, from_stored

KEY = b"8e03978e-40d5-43e8-bc93-6894a57f9324"
BODY = b'{"currency": "EUR", "amount": 10.00}'
SECRET = b"0123456789abcdef"
JSON = b"application/json"
ACME = Caller("acme")


def enrolment(effects=Effects.LOCAL, extract=None, **settings) -> Enrolment:
    return Enrolment("pay", effects, Policy(**settings), None, extract)


def parts(**changes) -> Parts:
    headers = [(b"content-type", JSON), (b"authorization", b"Bearer x"), (b"accept", b"*/*"), (b"x-own", b"1")]
    return Parts("POST", "/payments", b"draft=false", headers, JSON, BODY, "/api")._replace(**changes)


def made(enrolled=None, lines=(KEY,), caller=ACME, **changes) -> Claim:
    claim = claim_of(lines, parts(**changes), enrolled or enrolment(), caller)
    assert isinstance(claim, Claim)
    return claim


@pytest.mark.parametrize("secret", [None, SECRET])
def test_claim_contains_the_request_and_policy(secret):  # R33, D1
    settings = Policy(secret=secret, lease=7, deadline=70, call_timeout=5)
    claim = made(enrolment(secret=secret, lease=7, deadline=70, call_timeout=5))
    mark = fingerprint(Request("POST", "/payments", b"draft=false", JSON, BODY), secret=secret)
    record_id = RecordId(bound_scope(BindTo.TENANT, "-", "acme"), KEY.decode())
    assert (claim.id, claim.fingerprint, claim.seed) == (record_id, mark, Seeds(secret).of(record_id, mark))
    assert (claim.operation, claim.effects, claim.recovery) == ("pay", Effects.LOCAL, Recovery.RETRY)
    assert (claim.method, claim.path, claim.entered, claim.request) == ("POST", "/payments", True, None)
    assert (claim.lease, claim.deadline, claim.call_timeout) == (7_000_000, 70_000_000, 5_000_000)
    assert claim.ttl == micros(settings.ttl)


def test_claim_has_the_published_fingerprint():  # R33
    claim = made()
    assert claim.fingerprint == "jcs1:sha256:f305eac199a11c0271a16e5ab13224956ba0a14b36d7ff083b3a344d067453e2"


def test_a_nul_in_the_path_is_written_out():
    assert made(path="/a\0b").path == "/a%00b"


def test_every_claim_has_a_unique_owner_and_incarnation():  # P7
    claims = [made() for _ in range(500)]
    assert len({claim.incarnation for claim in claims}) == len({claim.owner for claim in claims}) == 500
    for claim in claims:
        process, _, token = claim.owner.rpartition(":")
        assert (process, len(token), int(token, 16) >= 0) == (PROCESS, 16, True)
        assert (claim.incarnation.version, claim.incarnation.variant) == (4, UUID(int=0x8 << 60).variant)
    # All the bits that may differ do.
    ones = zeros = 0
    for claim in claims:
        ones |= claim.incarnation.int
        zeros |= ~claim.incarnation.int
    assert (ones & zeros & (2**128 - 1)).bit_count() == 122


def test_forked_process_generates_different_owners():  # P7
    """Both would own the same record if they drew from one stream."""
    made()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, f"{made().owner} {made().incarnation}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 1000).decode().split()
    os.close(reading)
    os.close(writing)
    ours = [made() for _ in range(2)]
    assert len(theirs) == 2
    assert not {*theirs} & {name for claim in ours for name in (claim.owner, str(claim.incarnation))}


@pytest.mark.parametrize(
    ("lines", "settings", "code"),
    [
        ([], {}, Code.KEY_MISSING),
        ([KEY, KEY], {}, Code.KEY_MALFORMED),
        ([b"short"], {}, Code.KEY_MALFORMED),
        ([KEY], {"header_syntax": HeaderSyntax.STRICT}, Code.KEY_MALFORMED),
        ([b'"%b"' % KEY], {"header_syntax": HeaderSyntax.BARE}, Code.KEY_MALFORMED),
        ([b"z" * 36], {"key_format": KeyFormat.UUID}, Code.KEY_MALFORMED),
        ([b"bob@example.com-order-1"], {"pii_check": KeyCheck.REJECT}, Code.KEY_MALFORMED),
        ([b"a" * 20], {"guessable_check": KeyCheck.REJECT}, Code.KEY_MALFORMED),
    ],
)
def test_a_bad_key_is_refused_whatever_else_is_wrong(lines, settings, code):  # R77 in part
    refused = claim_of(lines, parts(body=b"{"), enrolment(**settings), Caller(""))
    assert isinstance(refused, Refuse)
    assert refused.code is code
    assert KEY.decode() not in refused.detail


def test_a_personal_key_is_taken_with_a_warning(caplog):  # R18, R195
    claim = made(lines=[b"bob@example.com-order-1"])
    assert claim.id.key == "bob@example.com-order-1"
    [line] = caplog.messages
    assert "personal data" in line
    assert "bob" not in line
    caplog.clear()
    made(enrolment(pii_check=KeyCheck.OFF), lines=[b"bob@example.com-order-1"])
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changes", "settings", "code"),
    [
        ({"body": b"{"}, {}, Code.BODY_INVALID),
        ({"body": b'{"a":1,"a":2}'}, {}, Code.BODY_INVALID),
        ({"body": b"[" * 101 + b"]" * 101}, {}, Code.BODY_INVALID),
        ({"content_type": b"application/json; charset=latin-1"}, {}, Code.BODY_INVALID),
        ({}, {"max_request_bytes": len(BODY) - 1}, Code.BODY_TOO_LARGE),
        ({"body": b"{" * 40}, {"max_request_bytes": 39}, Code.BODY_TOO_LARGE),
    ],
)
def test_invalid_body_is_rejected_before_the_caller_is_checked(changes, settings, code):
    # R40, R77 in part
    refused = claim_of([KEY], parts(**changes), enrolment(**settings), Caller(""))
    assert isinstance(refused, Refuse)
    assert refused.code is code


@pytest.mark.parametrize(
    ("bind_to", "caller"),
    [
        (BindTo.TENANT, Caller("acme")),
        (BindTo.PRINCIPAL, Caller("acme", "alice")),
        (BindTo.TOKEN, Caller("acme", token="Bearer x")),
        (BindTo.TENANT, Caller("acme", "alice", "Bearer x")),
    ],
)
def test_the_scope_is_the_callers(bind_to, caller):  # R23, R28
    claim = made(enrolment(bind_to=bind_to, namespace="shop"), caller=caller)
    tenant, principal, token = caller
    assert claim.id.scope == bound_scope(bind_to, "shop", tenant, principal=principal, token=token)


@pytest.mark.parametrize("bind_to", [BindTo.PRINCIPAL, BindTo.TOKEN])
def test_missing_bound_principal_or_token_raises(bind_to):  # R28
    with pytest.raises(ConfigurationError, match="this caller has none"):
        made(enrolment(bind_to=bind_to))


def test_no_tenant_is_a_mistake():  # R23
    with pytest.raises(ConfigurationError, match="non-empty str"):
        made(caller=Caller(" "))


def test_only_the_selected_fields_count():  # R39
    enrolled = enrolment(selection=Selection(exclude=("note",)))
    one, other = (made(enrolled, body=b'{"a":1,"note":"%b"}' % note) for note in (b"x", b"y"))
    assert one.fingerprint == other.fingerprint
    assert made(body=b'{"a":1,"note":"x"}').fingerprint != one.fingerprint


def test_route_extractor_chooses_the_fingerprinted_value():  # R39
    seen = []

    def chosen(request):
        seen.append(request)
        return {"amount": json.loads(request.body)["amount"]}

    enrolled = enrolment(extract=chosen, secret=SECRET)
    claim = made(enrolled)
    assert claim.fingerprint == Fingerprints(secret=SECRET).of_chosen({"amount": 10.0}, method="POST", path="/payments")
    assert seen == [Request("POST", "/payments", b"draft=false", JSON, BODY)]
    first = chosen_of(parts(), enrolled)
    assert first == {"amount": 10.0}
    assert fingerprint_for(parts(), enrolled, first) == claim.fingerprint
    assert len(seen) == 2


def test_body_rejected_by_the_extractor_is_refused():  # R40
    def chosen(request):
        raise BodyInvalidError("It cannot be read.")

    enrolled = enrolment(extract=chosen, max_request_bytes=100)
    for refused in (claim_of([KEY], parts(), enrolled, Caller("acme")), chosen_of(parts(), enrolled)):
        assert refused == Refuse(Code.BODY_INVALID, detail="It cannot be read.")
    assert chosen_of(parts(body=b"x" * 101), enrolled) is None
    assert chosen_of(parts(), enrolment()) is None


@pytest.mark.parametrize(("caller", "name"), [(Caller("acme"), "acme"), (Caller("acme", "alice"), "alice")])
def test_a_request_that_may_be_completed_is_kept_without_credentials(caller, name):  # H7
    claim = claim_of([KEY], parts(), enrolment(Effects.PHASED), caller, keep_headers=frozenset({b"x-own"}))
    assert isinstance(claim, Claim)
    assert claim.request is not None
    kept = from_stored(claim.request, None, about_of(claim.id, claim.fingerprint))
    assert (kept.method, kept.path, kept.query, kept.root_path) == ("POST", "/payments", b"draft=false", "/api")
    assert (kept.body, kept.principal) == (BODY, name)
    assert kept.headers == ((b"content-type", JSON), (b"accept", b"*/*"), (b"x-own", b"1"))
    assert made(enrolment(Effects.PHASED, complete=False)).request is None


def test_enrollment_equality_ignores_derived_values():
    once = object()
    one, other = (Enrolment("pay", Effects.LOCAL, Policy(secret=SECRET), once) for _ in range(2))
    assert one == other
    assert SECRET.decode() not in repr(one)


TOKEN = "sk_live_4c1d9a3e6d0b4f53"


@pytest.mark.parametrize(
    "field",
    [
        (b"authorization", f"Bearer {TOKEN}".encode()),
        (b"authorization", f"bearer   {TOKEN}".encode()),
        (b"authorization", TOKEN.encode()),
        (b"proxy-authorization", f"Basic {TOKEN}".encode()),
        (b"x-api-key", TOKEN.encode()),
    ],
    ids=lambda field: field[0].decode(),
)
@pytest.mark.parametrize("effects", Effects)
@pytest.mark.parametrize(
    ("what", "caller"),
    [("tenant", Caller(TOKEN)), ("tenant", Caller(TOKEN, "ann")), ("principal", Caller("acme", TOKEN))],
)
def test_a_credential_is_never_stored_as_the_name_of_a_caller(what, caller, effects, field):
    with pytest.raises(ConfigurationError, match=rf"the {what} function returned the credential of the field"):
        claim_of([KEY], parts(headers=[field]), enrolment(effects), caller)


def test_the_whole_field_is_a_credential_too():
    field = f"Bearer {TOKEN}"
    with pytest.raises(ConfigurationError, match="principal"):
        claim_of([KEY], parts(headers=[(b"authorization", field.encode())]), enrolment(), Caller("acme", field))


@pytest.mark.parametrize("caller", [ACME, Caller("acme", "x"), Caller(str(UUID(int=7)), "a-user-of-the-tenant")])
def test_a_name_that_is_not_the_credential_is_stored(caller):
    headers = [(b"authorization", b"Bearer acme"), (b"x-tenant", str(UUID(int=7)).encode()), (b"x-api-key", b"x")]
    assert isinstance(claim_of([KEY], parts(headers=headers), enrolment(), caller), Claim)
