"""Clients of RocketMQ in other languages, unmodified, with this server: what they send arrives as they sent it.

Without the toolchain of a client its tests are skipped. With ``REAL_ROCKETMQ=1`` they run with RocketMQ's server, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.peer.jvm import unavailable_reason
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.remoting import Credentials
from tests.conformance.client_programs import CLIENTS, ClientProgram, ClientUnavailableError
from tests.conformance.servers import (
    ACCOUNT,
    ADMINISTRATOR,
    BrokerProcess,
    Server,
    guarded_server,
    is_registered,
    rocketmq_server,
    server_names,
)
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(2_400)]  # with the builds

_TIMEOUT_S = 120
_ORDERED = [f"{key} {number}" for number in range(8) for key in "ab"]


class Conversation(NamedTuple):
    """Events of a program that has ended."""

    client: str
    sent: dict[str, dict[str, Any]]
    received: list[dict[str, Any]]
    errors: list[dict[str, Any]]

    def by(self, listener: str) -> list[dict[str, Any]]:
        """Return what a listener received, in the order of its calls."""
        return [event for event in self.received if event["listener"] == listener]


def _expected(client: str) -> Counter[tuple[str, str]]:
    """Return (listener, body) -> number of times that the program receives it."""
    can = CLIENTS[client].can
    plain = {"sync", "fails once"} | {body for body in ("async", "one-way") if body in can}
    if "tags" not in can:
        plain.add("not selected")
    expected = Counter({("plain", body): 1 for body in plain})
    if "delay" in can:
        expected["plain", "delayed"] = 1
    if "retry" in can:
        expected["plain", "fails once"] = 2
    for listener in ("ordered", "pull"):
        if listener in can:
            expected.update((listener, body) for body in _ORDERED)
    return expected


def _cases(ability: str | None = None, accounts: Sequence[bool] = (False, True)) -> list[object]:
    """Return (client, has an account) for the clients that have an ability."""
    return [
        pytest.param((name, account), id=f"{name} with an account" if account else name)
        for name, client in CLIENTS.items()
        for account in accounts
        if (ability is None or ability in client.can) and ("accounts" in client.can or not account)
    ]


# --- servers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=server_names())
def server_name(request: pytest.FixtureRequest) -> str:
    """Name of a server, which can run here."""
    if request.param != "mqtemplate" and (reason := unavailable_reason()):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def open_server(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server without access control."""
    start = BrokerProcess if server_name == "mqtemplate" else rocketmq_server
    with start(tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with access control."""
    with guarded_server(server_name, tmp_path_factory.mktemp("guarded")) as server:
        yield server


def _create_topics(server: Server, credentials: Credentials | None, folder: Path, *topics: str) -> None:
    settings = RemoteSettings(name_servers=(server.address,), offset_path=folder / "offsets", credentials=credentials)
    eventually(lambda: is_registered(settings), "the broker has registered", timeout_s=90)
    with RemoteBroker(settings) as broker:
        for topic in topics:
            broker.create_topic(topic, 2)


def _build(name: str) -> None:
    """Build the program of a client before a server starts, or skip the test."""
    try:
        CLIENTS[name].command()
    except ClientUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def conversation(
    request: pytest.FixtureRequest, server_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Conversation:
    """The events of one program, run once for all tests."""
    name, has_account = request.param
    if server_name != "mqtemplate" and (reason := CLIENTS[name].fails_with_rocketmq):
        pytest.skip(reason)
    _build(name)
    server: Server = request.getfixturevalue("guarded" if has_account else "open_server")
    account, administrator = (ACCOUNT, ADMINISTRATOR) if has_account else (None, None)
    if server_name != "mqtemplate":
        administrator = account  # RocketMQ has one account, which may do everything.
    prefix = f"{name}-"
    _create_topics(server, administrator, tmp_path_factory.mktemp(name), f"{prefix}plain", f"{prefix}ordered")
    with ClientProgram(name, server.address, prefix, account) as program:
        program.events("finished", 1, _TIMEOUT_S)
        received = program.events("received", _expected(name).total(), _TIMEOUT_S)
        sent = {event["body"]: event for event in program.events("sent")}
    return Conversation(name, sent, received, program.events("error"))


# --- tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversation", _cases(), indirect=True)
def test_each_message_arrives_and_no_call_fails(conversation: Conversation) -> None:
    """A message that the tags do not select does not arrive, where the client selects by tag."""
    arrived = Counter((event["listener"], event["body"]) for event in conversation.received)

    assert conversation.errors == []
    assert arrived == _expected(conversation.client)
    assert {event["status"] for event in conversation.sent.values()} in ({"SEND_OK"}, {None})


@pytest.mark.parametrize("conversation", _cases("tags"), indirect=True)
def test_a_message_has_its_tag_and_its_key(conversation: Conversation) -> None:
    """And the ID of the send result, where the client has one."""
    [found] = [event for event in conversation.by("plain") if event["body"] == "sync"]

    sent = conversation.sent["sync"]
    assert (found["tags"], found["keys"], found["reconsume_times"]) == ("paid", "k-1", 0)
    assert sent["msg_id"] in {None, found["msg_id"]}


@pytest.mark.parametrize("conversation", _cases(accounts=[False]), indirect=True)
def test_a_message_is_stored_with_its_tag_and_found_by_its_key(
    conversation: Conversation, open_server: Server, tmp_path: Path
) -> None:
    settings = RemoteSettings(name_servers=(open_server.address,), offset_path=tmp_path / "offsets")
    with RemoteBroker(settings) as broker:
        stored = broker.reader.messages_by_key(f"{conversation.client}-plain", "k-1")

    [found] = [message for message in stored if message.body in {b"sync", b'"sync"'}]  # Spring Cloud Stream writes JSON
    assert (found.tags, found.keys) == ("paid", "k-1")


@pytest.mark.parametrize("conversation", _cases("delay"), indirect=True)
def test_a_message_with_a_delay_level_is_not_early(conversation: Conversation) -> None:
    [found] = [event for event in conversation.by("plain") if event["body"] == "delayed"]

    assert found["delay_ms"] >= 1_000


@pytest.mark.parametrize("conversation", _cases("retry"), indirect=True)
def test_a_message_whose_listener_fails_is_delivered_again(conversation: Conversation) -> None:
    found = [event for event in conversation.by("plain") if event["body"] == "fails once"]

    assert [(event["tags"], event["reconsume_times"]) for event in found] == [("paid", 0), ("paid", 1)]


@pytest.mark.parametrize("conversation", _cases("ordered"), indirect=True)
def test_an_ordered_listener_receives_each_key_in_order(conversation: Conversation) -> None:
    bodies = [event["body"] for event in conversation.by("ordered")]

    for key in "ab":
        assert [body for body in bodies if body[0] == key] == [f"{key} {number}" for number in range(8)]


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if "accounts" in client.can])
def test_a_wrong_secret_key_is_refused(name: str, server_name: str, request: pytest.FixtureRequest) -> None:
    """Nothing is sent or received, and the client has an error."""
    _build(name)
    server: Server = request.getfixturevalue("guarded")
    wrong = Credentials(access_key=ACCOUNT.access_key, secret_key="another-secret")
    with ClientProgram(name, server.address, f"{name}-", wrong) as program:
        program.events("finished", 1, 2 * _TIMEOUT_S)
        sent, received = program.events("sent"), program.events("received")
        errors = [event for event in program.events("error") if event["call"] == "send"]

    assert (sent, received) == ([], [])
    assert errors
