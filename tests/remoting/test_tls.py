"""TLS: on the same port, detected by the first byte; an untrusted certificate is refused with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import ssl
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.errors import BrokerError, ConfigurationError, RemoteConnectError
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
from tests.remoting.conftest import NewClient, OpenPeer, StartServer
from tests.remoting.wire import (
    BIG,
    HOLD,
    LONG_MS,
    LOOPBACK,
    EchoServer,
    Results,
    address_of,
    echo,
    echoed,
    in_threads,
    response_of,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(not has_openssl(), reason="there is no openssl command to make certificates with")


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


@pytest.fixture
def tls_server(start_server: StartServer, tls: ServerTls) -> EchoServer:
    """A server with TLS, which also accepts connections without it."""
    return start_server(RemotingServerSettings(tls=tls))


@pytest.fixture
def tls_client(new_client: NewClient) -> RemotingClient:
    """A client that trusts every server."""
    return new_client(client_settings(insecure=True))


def server_tls(own: tuple[Path, Path], **options: object) -> ServerTls:
    return ServerTls(cert_path=str(own[0]), key_path=str(own[1]), **options)  # type: ignore[arg-type]


def client_settings(**options: object) -> RemotingClientSettings:
    return RemotingClientSettings(tls=ClientTls(**options))  # type: ignore[arg-type]


def invoke(client: RemotingClient, server: EchoServer) -> bytes:
    return client.invoke(str(server.address), echo(b"secret"), LONG_MS).body


# --- modes ----------------------------------------------------------------------------------------------


def test_a_permissive_server_accepts_connections_with_and_without_tls(
    tls_server: EchoServer, new_client: NewClient, certificates: Certificates
) -> None:
    under_tls, plain = new_client(client_settings(trust_cert_path=str(certificates.authority))), new_client()

    assert (invoke(under_tls, tls_server), invoke(plain, tls_server)) == (b"secret", b"secret")

    assert sorted(connection.is_tls for connection in tls_server.connections()) == [False, True]


def test_an_enforcing_server_closes_plain_connections(
    start_server: StartServer, client: RemotingClient, tls_client: RemotingClient, tls: ServerTls
) -> None:
    server = start_server(RemotingServerSettings(tls=dataclasses.replace(tls, mode=TlsMode.ENFORCING)))

    with capture_logs() as logs, pytest.raises(RemoteConnectError):
        invoke(client, server)

    assert [entry["reason"] for entry in logs if entry["log_level"] == "warning"] == [
        "the client does not use TLS, which this server enforces"
    ]
    assert invoke(tls_client, server) == b"secret"


def test_a_server_with_disabled_tls_accepts_plain_connections_only(
    start_server: StartServer, client: RemotingClient, tls_client: RemotingClient, tls: ServerTls
) -> None:
    server = start_server(RemotingServerSettings(tls=dataclasses.replace(tls, mode=TlsMode.DISABLED)))

    assert invoke(client, server) == b"secret"
    with capture_logs(), pytest.raises(RemoteConnectError, match=r"no TLS with .*; does that server use TLS"):
        invoke(tls_client, server)


# --- trust ----------------------------------------------------------------------------------------------


def test_an_unknown_authority_is_refused(tls_server: EchoServer, new_client: NewClient) -> None:
    with capture_logs(), pytest.raises(RemoteConnectError) as raised:
        invoke(new_client(client_settings()), tls_server)

    assert str(raised.value).startswith(f"the certificate of {tls_server.address} is refused (unable to get")
    assert "set trust_cert_path to the certificate of its issuer" in str(raised.value)


def test_a_certificate_for_another_host_is_refused_unless_names_are_not_checked(
    start_server: StartServer, new_client: NewClient, certificates: Certificates, issued: dict[str, tuple[Path, Path]]
) -> None:
    server = start_server(RemotingServerSettings(tls=server_tls(issued["elsewhere"])))
    trust = str(certificates.authority)

    with (
        capture_logs(),
        pytest.raises(RemoteConnectError, match="check_host_name to false if it is for another name"),
    ):
        invoke(new_client(client_settings(trust_cert_path=trust)), server)

    assert invoke(new_client(client_settings(trust_cert_path=trust, check_host_name=False)), server) == b"secret"


def test_the_insecure_mode_trusts_every_server(tls_server: EchoServer, tls_client: RemotingClient) -> None:
    assert invoke(tls_client, tls_server) == b"secret"


@pytest.mark.parametrize("client_auth", [ClientAuth.REQUIRE, ClientAuth.OPTIONAL])
def test_only_a_required_certificate_must_not_be_missing(
    start_server: StartServer,
    new_client: NewClient,
    certificates: Certificates,
    issued: dict[str, tuple[Path, Path]],
    client_auth: ClientAuth,
) -> None:
    trust = {"trust_cert_path": str(certificates.authority)}
    server = start_server(RemotingServerSettings(tls=server_tls(issued["server"], client_auth=client_auth, **trust)))
    without, cert_and_key = new_client(client_settings(**trust)), map(str, issued["client"])

    if client_auth is ClientAuth.REQUIRE:
        with capture_logs() as logs, pytest.raises(BrokerError):
            invoke(without, server)
        assert "TLS handshake: PEER_DID_NOT_RETURN_A_CERTIFICATE" in [entry.get("reason") for entry in logs]
    else:
        assert invoke(without, server) == b"secret"
    own = dict(zip(("cert_path", "key_path"), cert_and_key, strict=True))
    assert invoke(new_client(client_settings(**trust, **own)), server) == b"secret"


# --- bytes under TLS --------------------------------------------------------------------------------------


def test_large_frames_go_both_ways_under_tls(tls_server: EchoServer, tls_client: RemotingClient) -> None:
    """They are larger than a record and than the buffers of the sockets."""
    echoed(tls_client, tls_server, bytes(range(256)) * 30_000)

    big = RemotingCommand(BIG, body=b"16000000")
    assert tls_client.invoke(address_of(tls_server), big, LONG_MS).body == bytes(16_000_000)


def test_many_threads_share_a_connection_under_tls(tls_server: EchoServer, tls_client: RemotingClient) -> None:
    """Two threads must not use OpenSSL's state at once, in either direction."""
    bodies = [[b"%d:%d;" % (thread, number) * 3_000 for number in range(60)] for thread in range(6)]

    in_threads(6, lambda thread: [echoed(tls_client, tls_server, body) for body in bodies[thread]])

    assert tls_server.seen.qsize() == 360


def test_held_requests_are_answered_from_other_threads_under_tls(
    tls_server: EchoServer, tls_client: RemotingClient
) -> None:
    results: Results = queue.Queue()
    tls_client.invoke_async(address_of(tls_server), RemotingCommand(HOLD), LONG_MS, results.put)
    connection, held = tls_server.held.get(timeout=PATIENCE_S)

    connection.reply(held.response(), body=[b"part"] * 5_000)

    assert response_of(results).body == b"part" * 5_000


# --- faulty peers under TLS -------------------------------------------------------------------------------


def test_garbage_after_the_first_byte_closes_that_connection(tls_server: EchoServer, open_peer: OpenPeer) -> None:
    good, bad = open_peer(tls_server), open_peer(tls_server)
    assert good.invoke(echo()).code == 0

    with capture_logs() as logs:
        bad.send(b"\x16" + b"\xff" * 100)
        with contextlib.suppress(ConnectionError):
            while bad.socket.recv(4_096):
                pass  # a TLS alert arrives first

    assert any(str(entry.get("reason")).startswith("TLS handshake: ") for entry in logs)
    assert good.invoke(echo()).code == 0


def test_an_incomplete_handshake_times_out(start_server: StartServer, open_peer: OpenPeer, tls: ServerTls) -> None:
    clock = VirtualClock()
    server = start_server(RemotingServerSettings(tls=tls), clock)
    slow, good = open_peer(server), open_peer(server)
    slow.send(b"\x16\x03\x01")
    assert good.invoke(echo()).code == 0

    with capture_logs() as logs:
        clock.move_ms(30_000)
        server.loop.wake()
        assert slow.is_closed_by_peer()

    assert "the TLS handshake is not complete after 30s" in [entry.get("reason") for entry in logs]
    assert good.invoke(echo()).code == 0


def test_a_silent_client_is_closed_as_idle(start_server: StartServer, open_peer: OpenPeer, tls: ServerTls) -> None:
    clock = VirtualClock()
    server = start_server(RemotingServerSettings(tls=tls), clock)
    silent, good = open_peer(server), open_peer(server)
    assert good.invoke(echo()).code == 0

    clock.move_ms(120_000)
    server.loop.wake()

    assert silent.is_closed_by_peer()


def test_connections_in_handshake_count_as_connections(
    start_server: StartServer, open_peer: OpenPeer, tls: ServerTls
) -> None:
    """Otherwise a client could open any number of them by sending nothing."""
    server = start_server(RemotingServerSettings(tls=tls, max_connections=2))
    open_peer(server)
    good = open_peer(server)
    assert good.invoke(echo()).code == 0

    with capture_logs():
        assert open_peer(server).is_closed_by_peer()


def test_stopping_closes_connections_in_handshake(tls_server: EchoServer, open_peer: OpenPeer) -> None:
    silent, good = open_peer(tls_server), open_peer(tls_server)
    assert good.invoke(echo()).code == 0

    tls_server.stop()

    assert silent.is_closed_by_peer()


def test_the_reset_of_a_tls_connection_is_detected(tls_server: EchoServer, open_peer: OpenPeer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    peer = open_peer(tls_server, wrap=context.wrap_socket)
    assert peer.invoke(echo()).code == 0

    peer.reset()

    assert tls_server.closed.get(timeout=PATIENCE_S).is_tls


# --- settings ---------------------------------------------------------------------------------------------


def test_the_error_names_a_file_that_is_missing_or_wrong(issued: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
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


def test_an_encrypted_key_needs_its_password(
    start_server: StartServer, tls_client: RemotingClient, certificates: Certificates
) -> None:
    own = certificates.issue("locked", "IP:127.0.0.1", password="open-sesame")

    with pytest.raises(ConfigurationError, match="an encrypted key needs its password") as raised:
        RemotingServer(LOOPBACK, RemotingServerSettings(tls=server_tls(own, key_password="wrong")), SystemClock())
    with pytest.raises(ConfigurationError):
        RemotingServer(LOOPBACK, RemotingServerSettings(tls=server_tls(own)), SystemClock())

    assert "wrong" not in str(raised.value)
    assert "open-sesame" not in repr(server_tls(own, key_password="open-sesame"))
    server = start_server(RemotingServerSettings(tls=server_tls(own, key_password="open-sesame")))
    assert invoke(tls_client, server) == b"secret"


def test_client_certificates_need_a_trusted_authority(issued: dict[str, tuple[Path, Path]]) -> None:
    tls = server_tls(issued["server"], client_auth=ClientAuth.REQUIRE)

    with pytest.raises(ConfigurationError, match="client_auth is require, but trust_cert_path is not set"):
        RemotingServer(LOOPBACK, RemotingServerSettings(tls=tls), SystemClock())
