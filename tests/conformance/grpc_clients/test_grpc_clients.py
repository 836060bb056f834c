"""RocketMQ's gRPC clients, unmodified: each does the same cases with this project's server and RocketMQ's proxy.

Without the toolchain of a client its tests are skipped. With ``REAL_ROCKETMQ=1`` they run with RocketMQ's proxy in both
modes, too. Each test shows a cell of `tests.conformance.grpc_clients.matrix`, or several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.errors import BrokerError
from mqtemplate.message import MessageQueue
from tests.conformance.client_programs import ClientUnavailableError
from tests.conformance.grpc_clients.accounts import RIGHTS_CASE, USERS
from tests.conformance.grpc_clients.programs import CLIENTS, create_topics, run_cases
from tests.conformance.grpc_clients.servers import OWN, GrpcServer
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(3_000)]  # with the builds
_INVISIBLE_MS = 10_000
"""Invisible time with which the programs receive."""
_CHANGED_MS = 15_000
"""Invisible time that they set for one message."""
_ROUNDING_MS = 10
"""Servers round the time of a delivery down, and clients their times."""


class Run(NamedTuple):
    """Results of a client by case, and the server."""

    client: str
    server_name: str
    server: GrpcServer
    results: dict[str, dict[str, Any]]

    def result(self, case: str, cell: str = "") -> dict[str, Any]:
        """Return what a case printed, or skip or expect a failure for the reason that `CLIENTS` has."""
        _require(self.client, cell or case)
        found = self.results[case]
        _expect_failure(self.client, self.server_name, cell or case, found)
        assert "error" not in found, found["error"]
        if self.server_name == OWN:
            assert found["receive_errors"] == []
        return found


def _build(name: str) -> None:
    try:
        CLIENTS[name].command()
    except ClientUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    """Name of a client whose program is built before a server starts."""
    _build(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def run(client: str, server_name: str, open_server: GrpcServer) -> Run:
    """All cases of a client, run once for all tests."""
    cases = CLIENTS[client].cases()
    create_topics(open_server, f"{client}-", cases)
    return Run(client, server_name, open_server, run_cases(client, open_server, f"{client}-", cases))


# --- the cases -----------------------------------------------------------------------------------------


def _is_whole(found: dict[str, Any]) -> bool:
    """Return True if the message of the case ``normal`` arrived as it was sent."""
    expected = {
        "body": "hello",
        "tag": "paid",
        "keys": ["k-1", "k-2"],
        "properties": {"color": "red"},
        "attempt": 1,
        "id": found["sent"],
    }
    return bool(found["received"] == expected)


@pytest.mark.cell("normal")
def test_a_message_arrives_as_it_was_sent(run: Run) -> None:
    """With its body, tag, keys, property and message ID."""
    found = run.result("normal")

    assert _is_whole(found), found


@pytest.mark.cell("fifo")
def test_messages_of_a_group_arrive_in_their_order(run: Run) -> None:
    received = run.result("fifo")["received"]

    for group in "ab":
        assert [body for body in received if body[0] == group] == [f"{group} {number}" for number in range(4)]


@pytest.mark.cell("delay")
def test_a_delayed_message_is_not_early(run: Run) -> None:
    found = run.result("delay")

    assert found["body"] == "delayed"
    assert found["received_ms"] >= found["deliver_ms"]


@pytest.mark.cell("transaction")
def test_transactions_are_committed_rolled_back_and_checked(run: Run) -> None:
    """A message whose transaction is left open arrives after a check."""
    found = run.result("transaction")

    assert found["received"] == ["checked", "committed"]
    assert set(found["checked"]) == {"checked"}


@pytest.mark.cell("level")
def test_a_level_delays_a_message(run: Run) -> None:
    run.result("delay", "level")


@pytest.mark.cell("simple")
def test_a_simple_consumer_acknowledges_and_lets_expire(run: Run) -> None:
    """Only what is not acknowledged comes again, when it becomes visible and not before."""
    deliveries = run.result("simple")["deliveries"]

    assert sorted((each["body"], each["attempt"]) for each in deliveries) == [
        ("acked", 1),
        ("changed", 1),
        ("changed", 2),
        ("expires", 1),
        ("expires", 2),
    ]
    assert _second_after_ms(deliveries, "expires") >= _INVISIBLE_MS - _ROUNDING_MS


@pytest.mark.cell("change")
def test_a_simple_consumer_changes_the_invisible_time(run: Run) -> None:
    """The message comes again after the new time, which is longer."""
    deliveries = run.result("simple", "change")["deliveries"]

    assert _second_after_ms(deliveries, "changed") >= _CHANGED_MS - _ROUNDING_MS


def _second_after_ms(deliveries: list[dict[str, Any]], body: str) -> int:
    """Return the time from the call that received a message to its second delivery."""
    [found] = [each["after_ms"] for each in deliveries if each["body"] == body and each["attempt"] == 2]
    return int(found)


@pytest.mark.cell("push")
def test_a_push_consumer_retries_until_the_message_is_a_dead_letter(run: Run, tmp_path: Path) -> None:
    found = run.result("push")

    attempts = sorted((each["body"], each["attempt"]) for each in found["deliveries"])
    assert attempts == [
        ("fails always", 1),
        ("fails always", 2),
        ("fails always", 3),
        ("fails once", 1),
        ("fails once", 2),
        ("ok", 1),
    ]
    _assert_dead_letter(run, tmp_path)


def _assert_dead_letter(run: Run, tmp_path: Path) -> None:
    """Check the dead letter topic of the push consumer's group, read by the remoting protocol."""
    topic = f"%DLQ%{run.client}-push-group"
    settings = RemoteSettings(name_servers=(run.server.address,), offset_path=tmp_path / "offsets")
    with RemoteBroker(settings) as broker:

        def bodies() -> list[bytes]:
            try:
                found = broker.reader.pull(MessageQueue(topic, "broker-a", 0), 0, 32)
            except BrokerError as exc:
                if "TOPIC_NOT_EXIST" in str(exc):
                    return []  # the first dead letter creates it
                raise
            return [message.body for message in found.messages]

        eventually(lambda: bodies() == [b"fails always"], "the message is a dead letter")


@pytest.mark.cell("tags")
def test_tags_select_messages(run: Run) -> None:
    assert run.result("filter", "tags")["tags"] == ["a", "c"]


@pytest.mark.cell("sql")
def test_properties_select_messages(run: Run) -> None:
    assert run.result("filter", "sql")["sql"] == ["b", "c"]


@pytest.mark.cell("recall")
def test_a_recalled_message_does_not_arrive(run: Run) -> None:
    found = run.result("recall")

    assert found["recalled"] == found["sent"]
    assert found["received"] == ["kept"]


# --- transports and accounts ---------------------------------------------------------------------------


@pytest.mark.cell("tls")
def test_a_client_with_tls_sends_and_receives(client: str, server_name: str, open_server: GrpcServer) -> None:
    _require(client, "tls")
    prefix = f"{client}-tls-"
    create_topics(open_server, prefix, ["normal"])

    found = run_cases(client, open_server, prefix, ["normal"], tls=True)["normal"]

    _expect_failure(client, server_name, "tls", found)
    assert _is_whole(found), found


@pytest.fixture(scope="session")
def outcomes(client: str, guarded_server: GrpcServer) -> dict[str, dict[str, str]]:
    """What a client printed for each of `USERS`, in one run."""
    prefix = f"{client}-"
    create_topics(guarded_server, prefix, [RIGHTS_CASE])
    accounts = [user.credentials for user in USERS.values()]
    found = run_cases(client, guarded_server, prefix, [RIGHTS_CASE], accounts=accounts)[RIGHTS_CASE]
    return dict(zip(USERS, found["outcomes"], strict=True))


@pytest.mark.cell
@pytest.mark.parametrize("user", USERS)
def test_an_account_may_do_what_its_rights_permit(
    client: str, server_name: str, outcomes: dict[str, dict[str, str]], user: str
) -> None:
    """Sending needs PUB on the topic, receiving SUB on the topic and on the group."""
    found = outcomes[user]
    if reason := CLIENTS[client].failure(user, server_name):
        pytest.xfail(f"{reason}: {found}")

    assert {call: found[call] == "ok" for call in ("send", "receive")} == {
        "send": USERS[user].sends,
        "receive": USERS[user].receives,
    }, found


def _require(client: str, cell: str) -> None:
    """Skip the test if the client lacks what a cell needs."""
    if reason := CLIENTS[client].missing(cell):
        pytest.skip(reason)


def _expect_failure(client: str, server_name: str, cell: str, found: dict[str, Any]) -> None:
    if "error" in found and (reason := CLIENTS[client].failure(cell, server_name)):
        pytest.xfail(f"{reason}: {found['error']}")
