"""Fork: a child has the memory of a client but none of its threads. It cannot use the client, nor harm the parent's."""

from __future__ import annotations

import os

import pytest

from mqtemplate.clock import SystemClock
from mqtemplate.errors import ForkedError
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from tests.forking import in_child
from tests.remoting.wire import LONG_MS, EchoServer, address_of, echo


@pytest.fixture
def address(server: EchoServer, client: RemotingClient) -> str:
    """The address of a server to which the client is connected."""
    client.invoke(address_of(server), echo(), LONG_MS)
    return address_of(server)


def test_the_error_of_a_client_created_before_a_fork_states_what_to_do(client: RemotingClient, address: str) -> None:
    def use() -> str:
        errors = []
        for call in (
            lambda: client.invoke(address, echo(), LONG_MS),
            lambda: client.invoke_async(address, echo(), LONG_MS, print),
            lambda: client.invoke_one_way(address, echo()),
        ):
            with pytest.raises(ForkedError) as raised:
                call()
            errors.append(str(raised.value))
        return errors[0] if len(set(errors)) == 1 else repr(errors)

    error = in_child(use)

    assert error.startswith(f"this client was started by process {os.getpid()}, and this is process ")
    assert "Create the client after the fork" in error
    assert client.invoke(address, echo(b"parent"), LONG_MS).body == b"parent"


def test_closing_in_the_child_does_not_affect_the_parents_connection(
    server: EchoServer, client: RemotingClient, address: str
) -> None:
    def close() -> str:
        client.close()
        server.stop()
        return "closed"

    assert in_child(close) == "closed"
    assert client.invoke(address, echo(b"still here"), LONG_MS).body == b"still here"
    assert len(server.connections()) == 1


def test_a_child_may_create_its_own_client(client: RemotingClient, address: str) -> None:
    def ask() -> str:
        own = RemotingClient(RemotingClientSettings(), SystemClock())
        response = own.invoke(address, echo(b"child"), LONG_MS)
        own.close()
        return response.body.decode()

    assert in_child(ask) == "child"
    assert client.invoke(address, echo(b"parent"), LONG_MS).body == b"parent"
