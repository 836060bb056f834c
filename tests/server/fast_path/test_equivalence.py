"""With and without the fast path a server stores the same records and gives the same answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, decode_command, encode_command
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server import Account, AclSettings, BrokerServer, Right
from mqtemplate.store.settings import FlushDiskType
from tests.remoting.wire import RawPeer
from tests.server.fast_path.fast_serving import (
    MAX_OFFSET,
    NO_ID,
    answers,
    batch,
    in_one_turn,
    known_client,
    pull,
    records,
    send,
    serving,
)
from tests.server.serving import subscription
from tests.server.tool import heartbeat_body

SECRET = "a secret that is never shown"
KEY = "shop-owner"
ACL = AclSettings(
    accounts=(
        Account(
            access_key=KEY,
            secret_key=SECRET,
            default_group_perm=Right.SUB,
            topic_perms={"orders": Right.PUB | Right.SUB, "other": Right.SUB},
        ),
    )
)
BATCH, OWN, COMMIT = RequestCode.SEND_BATCH_MESSAGE, PullSysFlag.SUBSCRIPTION, PullSysFlag.COMMIT_OFFSET


class Request(NamedTuple):
    """A request of one kind; its queue, and a number that chooses sizes, values and what is wrong with it."""

    kind: str
    queue_id: int
    number: int


def several(opaque: int, request: Request, size: int, *, grows: bool = False, **more: Any) -> bytes:
    """Return a batch. Its length is one of several."""
    count = (1, 3, 8, 12, 40, 70)[request.number % 6]
    code = BATCH if request.number % 2 else RequestCode.SEND_MESSAGE_V2
    return batch(opaque, count, size, grows=grows, queue_id=request.queue_id, code=code, **more)


KINDS: dict[str, Callable[[int, Request], bytes]] = {
    "send": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id),
    "keys": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id, properties={"KEYS": f"order-{o} o"}),
    "ordered": lambda o, r: send(o, queue_id=r.queue_id, properties={"__SHARDINGKEY": f"customer {o}", "TAGS": "a"}),
    "tag": lambda o, r: send(o, queue_id=r.queue_id, properties={"TAGS": "ab"[r.number % 2]}),
    "property": lambda o, r: send(o, queue_id=r.queue_id, properties={"city": str(o)}),
    "text": lambda o, r: send(o, queue_id=r.queue_id, properties={"city": ("Zürich", '"', "a\\b", "")[r.number % 4]}),
    "level": lambda o, r: send(o, queue_id=r.queue_id, properties={"DELAY": str(r.number % 20)}),
    "priority": lambda o, r: send(o, queue_id=r.queue_id, properties={"_SYS_MSG_PRIORITY_": str(r.number % 5)}),
    "timer": lambda o, r: send(o, queue_id=r.queue_id, properties={"TIMER_DELAY_MS": ("500", "soon")[r.number % 2]}),
    "half": lambda o, r: send(o, queue_id=r.queue_id, properties={"TRAN_MSG": "true", "PGROUP": "producers"}),
    "internal": lambda o, r: send(o, queue_id=r.queue_id, properties={"REAL_TOPIC": "else", "CLUSTER": "mine"}),
    "one-way": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id, one_way=True),
    "no queue": lambda o, r: send(o, queue_id=(9, -2)[r.number % 2]),
    "topic": lambda o, r: send(o, topic=("other", "SCHEDULE_TOPIC_XXXX", "bad topic")[r.number % 3]),
    "retry": lambda o, r: send(o, topic="%RETRY%billing", queue_id=0),
    "too large": lambda o, r: send(o, bytes(9_000), queue_id=r.queue_id),
    "batch": lambda o, r: several(o, r, r.number % 3 * 50),
    "batch without id": lambda o, r: several(o, r, 50, properties=NO_ID),
    "tagged batch": lambda o, r: several(o, r, 8, of_messages={"TAGS": "a", "KEYS": "one two"}),
    "growing batch": lambda o, r: several(o, r, 3, grows=True),
    "delayed batch": lambda o, r: several(o, r, 3, of_messages={"DELAY": "2"}),
    "bad batch": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id, batch=True, code=BATCH),
    "command": lambda o, r: encode_command((replace(MAX_OFFSET, opaque=o), RemotingCommand(999, o))[r.number % 2]),
    "pull": lambda o, r: pull(o, r.number, queue_id=r.queue_id, sys_flag=OWN | COMMIT, commit=r.number),
    "pull again": lambda o, r: pull(o, 0, queue_id=r.queue_id),
    "pull tag": lambda o, r: pull(o, r.number, subscription="a", expression_type="TAG"),
    "pull sql": lambda o, r: pull(o, 0, subscription=("TAGS = 'a'", "TAGS =")[r.number % 2], expression_type="SQL92"),
    "pull far": lambda o, r: pull(o, (-1, 1 << 40)[r.number % 2], queue_id=r.queue_id),
    "pull no queue": lambda o, r: pull(o, queue_id=(-1, 9)[r.number % 2]),
    "pull topic": lambda o, r: pull(o, topic=("missing", "orders", "other")[r.number % 3], sys_flag=0),
    "pull limits": lambda o, r: pull(o, max_msg_nums=(0, 3, 1_000)[r.number % 3], max_msg_bytes=500),
    "pull group": lambda o, r: pull(o, consumer_group="auditing", sys_flag=OWN | COMMIT, commit=r.number),
    "pull subscribed": lambda o, r: pull(o, 0, queue_id=r.queue_id, sys_flag=0),
}
SENDS = [kind for kind in KINDS if not kind.startswith("pull")]


def change_topic(server: BrokerServer, number: int) -> None:
    perm = (2, 4, 6)[number % 3]
    server.engine.topics.update("orders", {"perm": perm, "readQueueNums": 4, "writeQueueNums": 4})


def change_group(server: BrokerServer, number: int) -> None:
    may = {"consume_enable": number % 3 > 0, "consume_broadcast_enable": number % 2 > 0}
    server.groups.put([SubscriptionGroupConfig(group_name="billing", **may)])


def change_local_members(server: BrokerServer, number: int) -> None:
    is_local = bool(number % 2)
    server.engine.engine.groups.local.has_members = lambda group: is_local and group == "billing"  # type: ignore[method-assign]


def heartbeat(number: int) -> bytes:
    """Return a heartbeat of the group *billing*: it subscribes to all messages or to a tag, or to nothing."""
    expressions = [["*"], ["a"], []][number % 3]
    data = [subscription("orders", each, sub_version=number + 1) for each in expressions]
    body = heartbeat_body("consumer-1", "billing", *data)
    return encode_command(RemotingCommand.request(RequestCode.HEART_BEAT, body=body, opaque=1))


CHANGES = {"topic": change_topic, "group": change_group, "local members": change_local_members}
"""What an administrator changes between two requests. The next request must notice it, and a heartbeat too."""
ALL = sorted({*KINDS, *CHANGES, "heartbeat"})
REQUESTS = st.lists(st.builds(Request, st.sampled_from(ALL), st.integers(0, 3), st.integers(0, 60)), max_size=40)


@pytest.fixture(autouse=True, scope="module")
def _one_turn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        in_one_turn(patch)
        yield


class Results(NamedTuple):
    """All that requests leave behind, to compare; *count* is the number of requests that the server has counted."""

    answers: dict[int, RemotingCommand]
    messages: dict[int, Any]
    units: list[Any]
    committed: list[int | None]
    records: list[Any]
    count: int


def results_of(
    requests: Sequence[Request],
    *,
    fast_path: bool,
    flush: FlushDiskType = FlushDiskType.ASYNC_FLUSH,
    acl: AclSettings | None = None,
    **limits: int,
) -> Results:
    """Send requests at once to a server, and return what they leave behind.

    A queue that is negative is chosen at random, so each server draws the same numbers.
    """
    signed = list if acl is None else _signed
    random.seed(0)
    found: dict[int, RemotingCommand] = {}
    with serving(flush, fast_path=fast_path, acl=acl, max_message_size=8_000, **limits) as server:
        with known_client(server, signed) as peer, RawPeer(server.remoting.address) as member:
            for is_change, part in groupby(enumerate(requests, start=11), lambda each: each[1].kind not in KINDS):
                if is_change:
                    _change(server, member, signed, [request for _, request in part])
                else:
                    found |= _answers(peer, signed, dict(part))
        store, offset = server.engine.store, server.engine.engine.offsets.offset
        queues = [store.consume_queue("orders", queue_id) for queue_id in range(4)]
        return Results(
            {opaque: replace(response, body=b"") for opaque, response in found.items()},
            {opaque: _messages_of(response) for opaque, response in found.items()},
            [queue.unit_tuples(0, queue.max_offset) for queue in queues],
            [offset(group, "orders", queue_id) for group in ("billing", "auditing") for queue_id in range(4)],
            records(server),
            server.remoting.request_count,
        )


Signed = Callable[[Sequence[bytes]], Sequence[bytes]]


def _answers(peer: RawPeer, signed: Signed, requests: dict[int, Request]) -> dict[int, RemotingCommand]:
    """Send requests at once, and return the responses to them and to a last command."""
    frames = [KINDS[request.kind](opaque, request) for opaque, request in requests.items()]
    last = encode_command(replace(MAX_OFFSET, opaque=9_999 + max(requests)))
    peer.send(b"".join(signed([*frames, last])))
    one_ways = sum(request.kind == "one-way" for request in requests.values())
    return answers(peer, len(frames) - one_ways + 1)


def _change(server: BrokerServer, member: RawPeer, signed: Signed, changes: Sequence[Request]) -> None:
    for change in changes:
        if change.kind in CHANGES:
            CHANGES[change.kind](server, change.number)
            continue
        member.send(*signed([heartbeat(change.number)]))
        while not member.next_command().is_response:  # members are also told of changes
            pass


def _signed(frames: Sequence[bytes]) -> list[bytes]:
    commands = [decode_command(frame) for frame in frames]
    for command in commands:
        sign_command(command, KEY, SECRET)
    return [encode_command(command) for command in commands]


def _messages_of(response: RemotingCommand) -> list[Any]:
    """Return the messages of a pull, without the port of the producer."""
    found = decode_messages(response.body, "broker-a")
    return [replace(message, born_host=message.born_host._replace(port=0)) for message in found]


def assert_equal_results(requests: Sequence[Request], **options: Any) -> Results:
    fast, slow = (results_of(requests, fast_path=fast_path, **options) for fast_path in (True, False))
    for with_fast_path, without in zip(fast, slow, strict=True):
        assert with_fast_path == without
    return fast


@settings(max_examples=25, deadline=None)
@given(REQUESTS)
def test_any_requests_leave_the_same_records_and_answers(requests: list[Request]) -> None:
    assert_equal_results(requests)


@settings(max_examples=10, deadline=None)
@given(REQUESTS)
def test_any_signed_requests_leave_the_same_records_and_answers(requests: list[Request]) -> None:
    """With access control each request is a command, but properties, batches and records are still read quickly."""
    assert_equal_results(requests, acl=ACL)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("flush", FlushDiskType)
def test_a_pipeline_stores_and_answers_as_commands_do(
    seed: int, flush: FlushDiskType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests, most of them frequent ones. With SYNC_FLUSH the flush decides when a pull finds a message."""
    chance, counts = random.Random(seed), list[int]()
    kinds = [*SENDS, *["send", "keys", "batch"] * 12, "tag"]
    if flush is FlushDiskType.ASYNC_FLUSH:
        kinds += [kind for kind in KINDS if kind not in SENDS] + ["pull", "pull again", "pull subscribed"] * 10
    requests = [Request(chance.choice(kinds), chance.randrange(4), chance.randrange(60)) for _ in range(250)]
    reply = Connection.reply_together

    def noted(self: Connection, opaques: Sequence[int], parts: Sequence[bytes]) -> None:
        counts.append(len(opaques))
        reply(self, opaques, parts)

    monkeypatch.setattr(Connection, "reply_together", noted)

    found = assert_equal_results(requests, flush=flush)

    assert sum(counts) > 100, "the pipeline answers most of the frequent requests"
    assert max(counts) > 3
    assert len(found.records) > 500


@pytest.mark.parametrize("seed", range(3))
def test_batches_at_the_ends_of_files_leave_the_same_records_and_answers(seed: int) -> None:
    """Some do not fit into the rest of a file of the log."""
    chance = random.Random(seed)
    kinds = ["batch", "batch", "tagged batch", "growing batch", "delayed batch"]
    requests = [Request(chance.choice(kinds), chance.randrange(4), chance.randrange(60)) for _ in range(60)]

    found = assert_equal_results(requests, mapped_file_size_commit_log=40_000)

    assert len(found.records) > 500
