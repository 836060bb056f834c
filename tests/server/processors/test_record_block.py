"""Blocks of records: what a program that parses many records at once gets."""

from __future__ import annotations

import pytest

from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.own_requests import GetRecordBlockRequestHeader, GetRecordBlockResponseHeader
from mqtemplate.server import Account, AclSettings, Right
from tests.server.serving import SECRET, RecordingConnection, Serving


def block(topic: str = "orders", queue_id: int = 0, queue_offset: int = 0, **limits: int) -> RemotingCommand:
    """Return a block of a server whose log has the messages of two topics in turn."""
    account = Account(
        access_key="spark-job", secret_key=SECRET, topic_perms={"orders": Right.SUB, "salaries": Right.PUB}
    )
    with Serving(acl=AclSettings(accounts=(account,))) as serving:
        for body in (b"one", b"two"):
            for each in ("orders", "salaries"):
                serving.engine.create_topic(each, 1)
                serving.engine.sends.send(Message(each, body))
        header = GetRecordBlockRequestHeader(
            topic=topic, queue_id=queue_id, queue_offset=queue_offset, end_offset=9, **limits
        )
        response = serving.request(
            RequestCode.GET_RECORD_BLOCK, header, over=RecordingConnection(access_key="spark-job")
        )
        assert response is not None
        return response


def test_a_block_has_the_records_of_its_queue_only() -> None:
    all_of_them, small = block(), block(max_bytes=1)

    assert b"one" in all_of_them.body
    assert b"salaries" not in all_of_them.body
    assert [each.header(GetRecordBlockResponseHeader).next_offset for each in (all_of_them, small)] == [2, 1]


@pytest.mark.parametrize(
    ("request_fields", "code"),
    [
        ({"topic": "salaries"}, ResponseCode.NO_PERMISSION),  # the right to send is not enough
        ({"queue_id": 7}, ResponseCode.INVALID_PARAMETER),
        ({"queue_offset": 5}, ResponseCode.PULL_OFFSET_MOVED),
    ],
)
def test_a_block_outside_of_what_the_account_may_read_is_refused(request_fields: dict[str, int], code: int) -> None:
    assert block(**request_fields).code == code
