"""RocketMQ's gRPC clients, unmodified: each does the same cases with this project's server and RocketMQ's proxy.

Without the toolchain of a client its tests are skipped. With ``REAL_ROCKETMQ=1`` they run with RocketMQ's proxy, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import MessageQueue
from mqtemplate.remoting import Credentials
from tests.conformance.client_programs import ClientUnavailableError
from tests.conformance.grpc_clients.programs import CLIENTS, create_topics, run_cases
from tests.conformance.grpc_clients.servers import GrpcServer
from tests.conformance.servers import ACCOUNT
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(3_000)]  # with the builds


class Run(NamedTuple):
    """Results of a client by case, and the server."""

    client: str
    server_name: str
    server: GrpcServer
    results: dict[str, dict[str, Any]]

    def result(self, case: str) -> dict[str, Any]:
        """Return what a case printed, or skip or expect a failure for the reason that `CLIENTS` has."""
        client = CLIENTS[self.client]
        if reason := client.lacks.get(case):
            pytest.skip(reason)
        found = self.results[case]
        if "error" in found and (reason := client.failure(case, self.server_name)):
            pytest.xfail(f"{reason}: {found['error']}")
        assert "error" not in found, found["error"]
        if self.server_name == "mqtemplate":
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


def test_a_message_arrives_as_it_was_sent(run: Run) -> None:
    """With its body, tag, keys, property and message ID."""
    found = run.result("normal")

    assert _is_whole(found), found


def test_messages_of_a_group_arrive_in_their_order(run: Run) -> None:
    received = run.result("fifo")["received"]

    for group in "ab":
        assert [body for body in received if body[0] == group] == [f"{group} {number}" for number in range(4)]


def test_a_delayed_message_is_not_early(run: Run) -> None:
    found = run.result("delay")

    assert found["body"] == "delayed"
    assert found["received_ms"] >= found["deliver_ms"]


def test_transactions_are_committed_rolled_back_and_checked(run: Run) -> None:
    """A message whose transaction is left open arrives after a check."""
    found = run.result("transaction")

    assert found["received"] == ["checked", "committed"]
    assert set(found["checked"]) == {"checked"}


def test_a_simple_consumer_acknowledges_changes_and_lets_expire(run: Run) -> None:
    """Only what is not acknowledged comes again, when it becomes visible and not before."""
    deliveries = run.result("simple")["deliveries"]

    assert sorted((each["body"], each["attempt"]) for each in deliveries) == [
        ("acked", 1),
        ("changed", 1),
        ("changed", 2),
        ("expires", 1),
        ("expires", 2),
    ]
    after_ms = {each["body"]: each["after_ms"] for each in deliveries if each["attempt"] == 2}
    assert 2_000 <= after_ms["changed"] < after_ms["expires"]
    assert after_ms["expires"] >= 10_000 - 500  # from the receive call; the first delivery is counted some time later


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
            found = broker.reader.pull(MessageQueue(topic, "broker-a", 0), 0, 32)
            return [message.body for message in found.messages]

        eventually(lambda: bodies() == [b"fails always"], "the message is a dead letter")


def test_tags_and_properties_select_messages(run: Run) -> None:
    found = run.result("filter")

    assert found["tags"] == ["a", "c"]
    assert found["sql"] == ["b", "c"]


def test_a_recalled_message_does_not_arrive(run: Run) -> None:
    found = run.result("recall")

    assert found["recalled"] == found["sent"]
    assert found["received"] == ["kept"]


# --- transports and accounts ---------------------------------------------------------------------------


def test_a_client_with_tls_sends_and_receives(client: str, server_name: str, open_server: GrpcServer) -> None:
    _require(client, "tls")
    prefix = f"{client}-tls-"
    create_topics(open_server, prefix, ["normal"])

    found = run_cases(client, open_server, prefix, ["normal"], tls=True)["normal"]

    _expect_failure(client, server_name, "tls", found)
    assert _is_whole(found), found


def test_a_client_with_an_account_sends_and_receives(client: str, server_name: str, guarded_server: GrpcServer) -> None:
    _require(client, "account")
    prefix = f"{client}-account-"
    create_topics(guarded_server, prefix, ["normal"])

    found = run_cases(client, guarded_server, prefix, ["normal"], account=ACCOUNT)["normal"]

    _expect_failure(client, server_name, "account", found)
    assert _is_whole(found), found


def test_a_wrong_secret_key_is_refused(client: str, guarded_server: GrpcServer) -> None:
    _require(client, "account")
    prefix = f"{client}-wrong-"
    create_topics(guarded_server, prefix, ["normal"])
    wrong = Credentials(access_key=ACCOUNT.access_key, secret_key="another-secret")

    found = run_cases(client, guarded_server, prefix, ["normal"], account=wrong)["normal"]

    assert "error" in found, found


def _require(client: str, ability: str) -> None:
    """Skip the test if the client lacks an ability."""
    if reason := CLIENTS[client].lacks.get(ability):
        pytest.skip(reason)


def _expect_failure(client: str, server_name: str, case: str, found: dict[str, Any]) -> None:
    if "error" in found and (reason := CLIENTS[client].failure(case, server_name)):
        pytest.xfail(f"{reason}: {found['error']}")
