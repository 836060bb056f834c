"""TLS: on the same port, found by the first byte, and refused with the reason where trust is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import ssl
import struct
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import BrokerError, ConfigurationError, RemoteConnectError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import (
    ClientAuth,
    ClientTls,
    RemotingClient,
    RemotingClientSettings,
    RemotingServer,
    RemotingServerSettings,
    ServerTls,
    TlsMode,
)
from mqtemplate.remoting.protocol import RemotingCommand
from tests.remoting.certificates import Certificates, has_openssl
from tests.remoting.conftest import Connect, Dial, Serve
from tests.remoting.wire import BIG, HOLD, LOOPBACK, PATIENCE_S, EchoServer, echo

pytestmark = pytest.mark.skipif(not has_openssl(), reason="there is no openssl command to make certificates with")

LONG_MS = 60_000


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def issued(certificates: Certificates) -> dict[str, tuple[Path, Path]]:
    return {
        "server": certificates.issue("server", "IP:127.0.0.1", "DNS:localhost"),
        "elsewhere": certificates.issue("elsewhere", "DNS:elsewhere.example.org"),
        "client": certificates.issue("client"),
    }


@pytest.fixture
def tls(issued: dict[str, tuple[Path, Path]]) -> ServerTls:
    return server_tls(issued["server"])


def server_tls(own: tuple[Path, Path], **options: object) -> ServerTls:
    return ServerTls(cert_path=str(own[0]), key_path=str(own[1]), **options)  # type: ignore[arg-type]


def client_settings(**options: object) -> RemotingClientSettings:
    return RemotingClientSettings(tls=ClientTls(**options))  # type: ignore[arg-type]


def ask(client: RemotingClient, server: EchoServer) -> bytes:
    return client.invoke(str(server.address), echo(b"secret"), LONG_MS).body


# --- modes ----------------------------------------------------------------------------------------------


def test_a_permissive_server_takes_both(
    serve: Serve, connect: Connect, tls: ServerTls, certificates: Certificates
) -> None:
    server = serve(RemotingServerSettings(tls=tls))
    under_tls, plain = connect(client_settings(trust_cert_path=str(certificates.authority))), connect()

    assert (ask(under_tls, server), ask(plain, server)) == (b"secret", b"secret")

    assert sorted(connection.is_tls for connection in server.connections()) == [False, True]


def test_an_enforcing_server_closes_plain_connections(serve: Serve, connect: Connect, tls: ServerTls) -> None:
    server = serve(RemotingServerSettings(tls=dataclasses.replace(tls, mode=TlsMode.ENFORCING)))

    with capture_logs() as logs, pytest.raises(RemoteConnectError):
        ask(connect(), server)

    assert [entry["reason"] for entry in logs if entry["log_level"] == "warning"] == [
        "it does not speak TLS, which this server enforces"
    ]
    assert ask(connect(client_settings(insecure=True)), server) == b"secret"


def test_a_server_whose_tls_is_disabled_is_plain(serve: Serve, connect: Connect, tls: ServerTls) -> None:
    server = serve(RemotingServerSettings(tls=dataclasses.replace(tls, mode=TlsMode.DISABLED)))

    assert ask(connect(), server) == b"secret"
    with capture_logs(), pytest.raises(RemoteConnectError, match=r"no TLS with .*; does that server speak TLS"):
        ask(connect(client_settings(insecure=True)), server)


# --- trust ----------------------------------------------------------------------------------------------


def test_an_unknown_authority_is_refused(serve: Serve, connect: Connect, tls: ServerTls) -> None:
    server = serve(RemotingServerSettings(tls=tls))

    with capture_logs(), pytest.raises(RemoteConnectError) as raised:
        ask(connect(client_settings()), server)

    assert str(raised.value).startswith(f"the certificate of {server.address} is refused (unable to get")
    assert "set trust_cert_path to who issued it" in str(raised.value)


def test_a_certificate_for_another_host_is_refused_unless_names_are_not_checked(
    serve: Serve, connect: Connect, certificates: Certificates, issued: dict[str, tuple[Path, Path]]
) -> None:
    server = serve(RemotingServerSettings(tls=server_tls(issued["elsewhere"])))
    trust = str(certificates.authority)

    with (
        capture_logs(),
        pytest.raises(RemoteConnectError, match="check_host_name to false where it is for another name"),
    ):
        ask(connect(client_settings(trust_cert_path=trust)), server)

    assert ask(connect(client_settings(trust_cert_path=trust, check_host_name=False)), server) == b"secret"


def test_the_insecure_mode_trusts_anybody(serve: Serve, connect: Connect, tls: ServerTls) -> None:
    assert ask(connect(client_settings(insecure=True)), serve(RemotingServerSettings(tls=tls))) == b"secret"


def test_a_required_certificate_of_the_client_is_asked_for(
    serve: Serve, connect: Connect, certificates: Certificates, issued: dict[str, tuple[Path, Path]]
) -> None:
    trust = str(certificates.authority)
    tls = server_tls(issued["server"], client_auth=ClientAuth.REQUIRE, trust_cert_path=trust)
    server = serve(RemotingServerSettings(tls=tls))
    cert, key = map(str, issued["client"])

    with capture_logs() as logs, pytest.raises(BrokerError):
        ask(connect(client_settings(trust_cert_path=trust)), server)

    assert "TLS handshake: PEER_DID_NOT_RETURN_A_CERTIFICATE" in [entry.get("reason") for entry in logs]
    with_own = client_settings(trust_cert_path=trust, cert_path=cert, key_path=key)
    assert ask(connect(with_own), server) == b"secret"


def test_an_optional_certificate_may_be_missing(
    serve: Serve, connect: Connect, certificates: Certificates, issued: dict[str, tuple[Path, Path]]
) -> None:
    trust = str(certificates.authority)
    tls = server_tls(issued["server"], client_auth=ClientAuth.OPTIONAL, trust_cert_path=trust)

    assert ask(connect(client_settings(trust_cert_path=trust)), serve(RemotingServerSettings(tls=tls))) == b"secret"


# --- bytes under TLS --------------------------------------------------------------------------------------


def test_large_frames_go_both_ways_under_tls(serve: Serve, connect: Connect, tls: ServerTls) -> None:
    """More than one record, and more than the sockets hold."""
    server, client = serve(RemotingServerSettings(tls=tls)), connect(client_settings(insecure=True))
    body = bytes(range(256)) * 30_000

    assert client.invoke(str(server.address), echo(body), LONG_MS).body == body
    assert client.invoke(str(server.address), RemotingCommand(BIG, body=b"16000000"), LONG_MS).body == bytes(16_000_000)


def test_many_threads_share_a_connection_under_tls(serve: Serve, connect: Connect, tls: ServerTls) -> None:
    """OpenSSL's state must not be used by two threads at once, in either direction."""
    server, client = serve(RemotingServerSettings(tls=tls)), connect(client_settings(insecure=True))
    wrong: list[bytes] = []

    def work(thread: int) -> None:
        for number in range(60):
            body = b"%d:%d;" % (thread, number) * 3_000
            if client.invoke(str(server.address), echo(body), LONG_MS).body != body:
                wrong.append(body[:9])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert server.seen.qsize() == 360


def test_held_requests_are_answered_from_other_threads_under_tls(
    serve: Serve, connect: Connect, tls: ServerTls
) -> None:
    server, client = serve(RemotingServerSettings(tls=tls)), connect(client_settings(insecure=True))
    answers: queue.Queue[object] = queue.Queue()
    client.invoke_async(str(server.address), RemotingCommand(HOLD), LONG_MS, answers.put)
    connection, held = server.held.get(timeout=PATIENCE_S)

    connection.reply(held.response(), body=[b"part"] * 5_000)

    answer = answers.get(timeout=PATIENCE_S)
    assert isinstance(answer, RemotingCommand)
    assert answer.body == b"part" * 5_000


# --- bad peers under TLS ----------------------------------------------------------------------------------


def test_garbage_after_the_first_byte_ends_that_connection(serve: Serve, dial: Dial, tls: ServerTls) -> None:
    server = serve(RemotingServerSettings(tls=tls))
    good, bad = dial(server), dial(server)
    assert good.ask(echo()).code == 0

    with capture_logs() as logs:
        bad.send(b"\x16" + b"\xff" * 100)
        with contextlib.suppress(ConnectionError):
            while bad.socket.recv(4_096):
                pass  # an alert comes first

    assert any(str(entry.get("reason")).startswith("TLS handshake: ") for entry in logs)
    assert good.ask(echo()).code == 0


def test_a_handshake_that_is_not_finished_is_given_up(serve: Serve, dial: Dial, tls: ServerTls) -> None:
    clock = VirtualClock()
    server = serve(RemotingServerSettings(tls=tls), clock)
    slow, good = dial(server), dial(server)
    slow.send(b"\x16\x03\x01")
    assert good.ask(echo()).code == 0

    with capture_logs() as logs:
        clock.move_ms(30_000)
        server.loop.wake()
        assert slow.is_closed_by_peer()

    assert "the TLS handshake is not complete after 30000 ms" in [entry.get("reason") for entry in logs]
    assert good.ask(echo()).code == 0


def test_one_that_says_nothing_is_closed_as_idle(serve: Serve, dial: Dial, tls: ServerTls) -> None:
    clock = VirtualClock()
    server = serve(RemotingServerSettings(tls=tls), clock)
    silent, good = dial(server), dial(server)
    assert good.ask(echo()).code == 0

    clock.move_ms(120_000)
    server.loop.wake()

    assert silent.is_closed_by_peer()


def test_greetings_count_as_connections(serve: Serve, dial: Dial, tls: ServerTls) -> None:
    """Or one could open as many as one likes by saying nothing."""
    server = serve(RemotingServerSettings(tls=tls, max_connections=2))
    dial(server)
    good = dial(server)
    assert good.ask(echo()).code == 0

    with capture_logs():
        assert dial(server).is_closed_by_peer()


def test_stopping_ends_greetings_too(serve: Serve, dial: Dial, tls: ServerTls) -> None:
    server = serve(RemotingServerSettings(tls=tls))
    silent, good = dial(server), dial(server)
    assert good.ask(echo()).code == 0

    server.stop()

    assert silent.is_closed_by_peer()


def test_a_peer_that_breaks_off_under_tls_is_noticed(serve: Serve, dial: Dial, tls: ServerTls) -> None:
    server = serve(RemotingServerSettings(tls=tls))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    peer = dial(server, wrap=context.wrap_socket)
    assert peer.ask(echo()).code == 0

    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.socket.close()

    assert server.closed.get(timeout=PATIENCE_S).is_tls


# --- settings ---------------------------------------------------------------------------------------------


def test_a_file_that_is_missing_or_wrong_is_named(issued: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    cert, key = issued["server"]
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")

    for own, reason in (
        ((tmp_path / "missing.pem", key), r"missing\.pem with private key .* cannot be used \(No such file"),
        ((nonsense, key), r"nonsense\.pem with private key"),
        ((cert, issued["client"][1]), "the key must belong to the certificate"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            RemotingServer(LOOPBACK, RemotingServerSettings(tls=server_tls(own)), SystemClock())
    with pytest.raises(ConfigurationError, match=r"trust_cert_path .*nonsense\.pem cannot be used .* certificates"):
        RemotingClient(client_settings(trust_cert_path=str(nonsense)), SystemClock())


def test_an_encrypted_key_needs_its_password(serve: Serve, connect: Connect, certificates: Certificates) -> None:
    own = certificates.issue("locked", "IP:127.0.0.1", password="open-sesame")

    with pytest.raises(ConfigurationError, match="an encrypted key needs its password") as raised:
        RemotingServer(LOOPBACK, RemotingServerSettings(tls=server_tls(own, key_password="wrong")), SystemClock())
    with pytest.raises(ConfigurationError):
        RemotingServer(LOOPBACK, RemotingServerSettings(tls=server_tls(own)), SystemClock())

    assert "wrong" not in str(raised.value)
    assert "open-sesame" not in repr(server_tls(own, key_password="open-sesame"))
    server = serve(RemotingServerSettings(tls=server_tls(own, key_password="open-sesame")))
    assert ask(connect(client_settings(insecure=True)), server) == b"secret"


def test_asking_clients_for_certificates_needs_to_know_who_may_issue_them(
    issued: dict[str, tuple[Path, Path]],
) -> None:
    tls = server_tls(issued["server"], client_auth=ClientAuth.REQUIRE)

    with pytest.raises(ConfigurationError, match="client_auth is require, but trust_cert_path is not set"):
        RemotingServer(HostAddress("127.0.0.1", 0), RemotingServerSettings(tls=tls), SystemClock())
