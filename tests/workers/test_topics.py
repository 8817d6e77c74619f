"""Topics and replies."""

from __future__ import annotations

from datetime import timedelta

import pytest

from oncekey import Once
from oncekey.core.errors import ConfigurationError, ResultNotStorableError
from oncekey.core.model import HOUR, MINUTE, StoredResponse
from oncekey.core.policy import Policy
from oncekey.core.topics import Reply, Topics, reply_of

JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("reply", "stored"),
    [
        (Reply(), StoredResponse(200, (JSON,), b"null")),
        (Reply(201, {"a": "é"}), StoredResponse(201, (JSON,), '{"a":"é"}'.encode())),
        (Reply(204), StoredResponse(204, (), b"")),
        (Reply(200, b"raw"), StoredResponse(200, (JSON,), b"raw")),
        (
            Reply(200, b"raw", (("Content-Type", "text/plain"), ("Set-Cookie", "a=b"), ("X-Own", "1"))),
            StoredResponse(200, ((b"content-type", b"text/plain"),), b"raw"),
        ),
        (Reply(201, 1, (("Location", "/o/1"),)), StoredResponse(201, (JSON, (b"location", b"/o/1")), b"1")),
    ],
)
def test_a_reply_is_stored_with_status_headers_and_body(reply, stored):  # R90
    assert reply.stored(Policy()) == stored


def test_an_oversized_reply_is_stored_without_its_body():  # A4
    reply = Reply(201, b"x" * 11, (("Location", "/o/1"), ("ETag", "1")))

    assert reply.stored(Policy(max_response_bytes=10)) == StoredResponse(201, ((b"location", b"/o/1"),), None)


@pytest.mark.parametrize("body", [object(), float("nan"), {1, 2}, "\ud800"])
def test_a_reply_that_is_not_json_raises(body):  # H1
    with pytest.raises(ResultNotStorableError):
        reply_of(body).stored(Policy())


@pytest.mark.parametrize("status", [0, 102, 600])
def test_a_reply_with_an_invalid_status_raises(status):
    with pytest.raises(ResultNotStorableError):
        Reply(status)


def test_a_reply_header_that_cannot_be_encoded_raises():
    with pytest.raises(ResultNotStorableError):
        Reply(200, headers=(("Location", "/☃"),)).stored(Policy())


def test_once_registers_topics():
    once = Once("memory:")

    @once.topic("charge", repeatable=True)
    async def charge(message): ...

    @once.topic("mail")
    def mail(message): ...

    assert once.topics.names == ("charge", "mail")
    assert (once.topics["charge"].repeatable, once.topics["charge"].blocking) == (20 * HOUR, False)
    assert (once.topics["mail"].repeatable, once.topics["mail"].blocking) == (None, True)
    assert "charge" in once.topics
    assert "other" not in once.topics


def test_a_repeatable_window_may_be_a_timedelta():  # H3
    topics = Topics()
    topics.topic("a", repeatable=timedelta(minutes=5))(print)

    assert topics["a"].repeatable == 5 * MINUTE


@pytest.mark.parametrize("name", ["", "x" * 101, "started", "finished", print])
def test_invalid_topic_names_are_rejected(name):
    with pytest.raises(ConfigurationError):
        Topics().topic(name)


@pytest.mark.parametrize("window", [timedelta(0), timedelta(seconds=-1), 20, None])
def test_invalid_repeatable_windows_are_rejected(window):
    with pytest.raises(ConfigurationError):
        Topics().topic("a", repeatable=window)


def test_a_second_function_for_a_topic_is_rejected():
    topics = Topics()
    topics.topic("a")(print)

    with pytest.raises(ConfigurationError, match="two functions"):
        topics.topic("a")(repr)


def test_the_repr_of_a_message_hides_its_content():
    from uuid import uuid4

    from oncekey.core.topics import Message

    shown = repr(Message("t", {"card": "4111 1111"}, "the-key", "the-downstream-key", 1, uuid4(), "tenant-7"))

    assert not [word for word in ("4111 1111", "the-key", "the-downstream-key", "tenant-7") if word in shown]
