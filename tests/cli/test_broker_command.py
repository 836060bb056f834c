"""``python -m mqtemplate broker``: its output, its end, and its errors."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.cli import main
from mqtemplate.cli.commands.broker import port_owner
from mqtemplate.cli.output import print_line
from mqtemplate.message import HostAddress, Message, Property, parse_offset_msg_id
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.identity import Credentials
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from mqtemplate.remoting.protocol.headers.group import GetMaxOffsetRequestHeader, OffsetResponseHeader
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2, SendMessageResponseHeader
from tests.cli.running import CommandLine
from tests.programs import run_python
from tests.server.process import BrokerProcess
from tests.server.tool import Tool
from tests.waiting import PATIENCE_S

SECRET = "a secret that is never shown"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return run_python(Path.cwd(), "-W", "error", "-m", "mqtemplate", *arguments, COLUMNS="120")


# --- running ----------------------------------------------------------------------------------------


def test_it_prints_its_addresses_in_one_line_and_serves_both(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--broker-name", "b1", "--cluster-name", "c1") as broker:
        with Tool(broker.name_server) as tool:
            info = ClusterInfo.decode(tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body)
        with Tool(broker.address) as tool:
            tool.send("orders")

        assert broker.line.startswith("b1 listens on 127.0.0.1:")
        assert broker.line.endswith(f", store {tmp_path / 'store'}; press Ctrl-C to stop")
    assert info.cluster_addr_table == {"c1": ["b1"]}
    assert info.broker_addr_table["b1"].broker_addrs == {0: str(broker.address)}


def test_each_signal_stops_it_cleanly_and_messages_survive(tmp_path: Path) -> None:
    """On loopback it does not warn."""
    header = GetMaxOffsetRequestHeader(topic="orders", queue_id=0)
    for count, number in enumerate([signal.SIGINT, signal.SIGTERM], 1):
        with BrokerProcess(tmp_path) as broker, Tool(broker.address) as tool:
            tool.send("orders")
            stored = tool.request_ok(RequestCode.GET_MAX_OFFSET, header).header(OffsetResponseHeader).offset
            code, output, errors = broker.stop(number)

        assert code == 0, errors
        assert output.splitlines() == [
            f"stopping ({number.name}) ...",
            "stopped; all acknowledged messages are on disk",
        ]
        assert not (tmp_path / "store" / "abort").exists()  # It exists until the store is closed.
        assert stored == count
        assert "warning" not in errors


def test_application_yml_has_the_same_settings_as_the_options(tmp_path: Path) -> None:
    """Applications and their server may share one file: the server ignores ``rocketmq.name-server``."""
    (tmp_path / "application.yml").write_text(
        f"""
rocketmq:
  name-server: 127.0.0.1:9876
mqtemplate:
  broker:
    broker-name: from-the-file
  server:
    cluster-name: c1
    acl:
      enabled: true
      accounts:
        - access-key: shop-owner
          secret-key: {SECRET}
          default-topic-perm: PUB|SUB
          group-perms:
            billing: SUB
"""
    )

    with BrokerProcess(tmp_path) as broker, Tool(broker.address) as anonymous:
        credentials = Credentials(access_key="shop-owner", secret_key=SECRET)
        with Tool(broker.address, credentials) as authenticated:
            authenticated.send("orders")
        refused = anonymous.request(RequestCode.GET_BROKER_CONFIG)
        _, output, errors = broker.stop()

    assert broker.line.startswith("from-the-file listens on ")
    assert refused.remark == "access control is enabled: configure the client with an access key and a secret key"
    assert SECRET not in output + errors


def test_recorded_requests_are_refused_within_the_window_of_application_yml(tmp_path: Path) -> None:
    """The log says at the start that only TLS prevents them."""
    account = f"{{access-key: shop-owner, secret-key: {SECRET}, topic-perms: {{orders: PUB}}}}"
    acl = f"{{enabled: true, replay-window-ms: 60000, accounts: [{account}]}}"
    (tmp_path / "application.yml").write_text(f"mqtemplate: {{server: {{acl: {acl}}}}}")
    header = SendMessageRequestHeaderV2(
        producer_group="shop",
        topic="orders",
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        sys_flag=0,
        born_timestamp=0,
        flag=0,
    )
    recorded = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, header, b"x")
    sign_command(recorded, "shop-owner", SECRET)

    with BrokerProcess(tmp_path) as broker, Tool(broker.address) as attacker:
        codes = [attacker.send_request(recorded).code for _ in range(2)]
        _, _, errors = broker.stop()

    assert codes == [ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION]
    assert "acl.tls_not_enforced" in errors


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_it_listens_on_an_ipv6_address(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--name-server", "none", listen="[::1]:0") as broker, Tool(broker.address) as tool:
        msg_id = tool.send("orders").header(SendMessageResponseHeader).msg_id

    assert broker.address.ip == "::1"
    assert parse_offset_msg_id(msg_id) == (broker.address, 0)


def test_with_the_name_server_none_the_broker_is_the_name_server(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--name-server", "none") as broker, Tool(broker.name_server) as tool:
        tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO)

        assert broker.name_server == broker.address


def test_it_warns_if_other_machines_can_connect_without_access_control(tmp_path: Path) -> None:
    """Tools connect to the address in a message ID, which has the port that the operating system chose."""
    with BrokerProcess(tmp_path, "--advertise", "127.0.0.1:0", listen="0.0.0.0:0") as broker:
        with Tool(broker.address) as tool:
            msg_id = tool.send("orders").header(SendMessageResponseHeader).msg_id
        _, _, errors = broker.stop()

    assert broker.address.ip == "127.0.0.1"
    assert parse_offset_msg_id(msg_id) == (broker.address, 0)
    assert (
        "warning: other machines can connect to 0.0.0.0:0, and access control is off: every client can read and write "
        "everything; set mqtemplate.server.acl, or listen on 127.0.0.1"
    ) in errors


# --- failed starts ----------------------------------------------------------------------------------


def test_the_error_for_a_used_port_or_store_names_its_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = CommandLine("none", tmp_path, capsys)
    store = tmp_path / "store"
    with BrokerProcess(tmp_path) as first:
        used = str(first.address)
        same_port = other("broker", "--store", str(tmp_path / "b"), "--listen", used)
        same_store = other("broker", "--store", str(store), "--listen", "127.0.0.1:0")

    assert (same_port.code, same_store.code) == (1, 1)
    assert f"What to do  {used} is used by process {first.process.pid} (" in same_port.errors
    assert "): stop it, or choose another address with --listen" in same_port.errors
    assert same_port.output == ""
    assert f"StoreLockedError: {store} is in use by process {first.process.pid}" in same_store.errors
    assert "Traceback" not in same_store.errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--listen", "10911"], "mqtemplate.server.listen: must be ip:port, for example 127.0.0.1:10911"),
        (
            ["--listen", "localhost:10911"],
            "mqtemplate.server.listen: must be a numeric address and a port, for example 127.0.0.1:10911",
        ),
        (["--listen", "127.0.0.1:70000"], "must have a port from 0 to 65535"),
        (["--listen", "0.0.0.0:10911"], "is 0.0.0.0:10911, which no client can connect to; say in 'advertise'"),
        (
            ["--listen", "127.0.0.1:9999", "--name-server", "127.0.0.1:9999"],
            "is the broker's address too; give another port, or 'none'",
        ),
        (["--config", "nowhere"], "config_folder 'nowhere' is not a folder\n"),
    ],
)
def test_invalid_settings_are_reported_with_exit_code_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    code = main(["broker", *arguments])

    errors = capsys.readouterr().err
    assert code == 1
    assert "APPLICATION FAILED TO START" in errors
    assert "What        ConfigurationError: " in errors
    assert text in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("acl: {enabled: true}", "mqtemplate.server.acl.enabled: is true, but there are no accounts"),
        (
            "acl: {accounts: [{access-key: shop-owner, secret-key: abcdefgh}]}",
            "mqtemplate.server.acl.accounts: are given, but 'enabled' is not true; set it, or remove them",
        ),
        ("tls: {mode: enforcing}", "mqtemplate.server.tls.mode: needs 'cert-path' and 'key-path' beside it"),
        ("tls: {client-auth: require}", "mqtemplate.server.tls.client-auth: needs 'trust-cert-path' beside it"),
        (
            "acl: {enabled: true, accounts: [{access-key: owner-1, secret-key: abcdefgh, default-topic-perm: READ}]}",
            "default-topic-perm",
        ),
        ("cluster: c1", "mqtemplate.server.cluster: no such key; did you mean 'mqtemplate.server.cluster-name'?"),
    ],
)
def test_errors_in_the_file_are_reported_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, text: str
) -> None:
    (tmp_path / "application.yml").write_text(f"mqtemplate:\n  server:\n    {section}\n")

    code = main(["broker", "--config", str(tmp_path), "--listen", "127.0.0.1:0", "--name-server", "none"])

    errors = capsys.readouterr().err
    assert code == 1
    assert "application.yml:3: " in errors
    assert text in errors
    assert "abcdefgh" not in errors


def test_an_unreadable_certificate_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "application.yml").write_text(
        "mqtemplate:\n  server:\n    tls: {mode: enforcing, cert-path: none.pem, key-path: none.pem}\n"
    )

    store = tmp_path / "store"
    code = main(["broker", "--config", str(tmp_path), "--store", str(store), "--listen", "127.0.0.1:0"])

    assert code == 1
    assert "none.pem" in capsys.readouterr().err


# --- help and output --------------------------------------------------------------------------------


def test_the_version_is_printed() -> None:
    done = run("--version")

    assert (done.returncode, done.stdout) == (0, f"mqtemplate {version('mqtemplate')}\n")


def test_help_lists_the_commands_and_their_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command_line = CommandLine("", tmp_path, capsys)

    top, broker = command_line.plain("--help"), command_line.plain("broker", "--help")

    assert (top.code, broker.code) == (0, 0)
    assert "broker  " in top.output
    assert "Run a broker and its name server." in top.output
    for option in ("--store DIR", "--listen IP:PORT", "--name-server IP:PORT", "--advertise", "--config", "--profile"):
        assert option in broker.output
    assert "mqtemplate.server.*" in broker.output


def test_a_command_is_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = CommandLine("", tmp_path, capsys).plain()

    assert done.code == 2
    assert re.search(r"Error: Missing command", done.errors)


def test_the_owner_of_a_port_is_found() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = HostAddress(*listening.getsockname())
        assert (port_owner(address.port) or "").startswith(f"process {os.getpid()} (")

    assert port_owner(address.port) is None


def test_characters_that_a_terminal_cannot_show_are_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    print_line("store /home/jörg", stream)

    stream.seek(0)
    assert stream.read() == "store /home/j\\xf6rg\n"


def test_it_stops_cleanly_with_a_closed_pipe_as_output(tmp_path: Path) -> None:
    """For example ``python -m mqtemplate broker | head -1``."""
    with BrokerProcess(tmp_path) as broker:
        assert broker.process.stdout is not None
        broker.process.stdout.close()
        broker.process.terminate()
        assert broker.process.stderr is not None
        errors = broker.process.stderr.read()
        code = broker.process.wait(PATIENCE_S)
        broker.process.stderr.close()

    assert code == 0, errors
    assert "BrokenPipe" not in errors


def test_without_process_information_a_port_has_no_owner(tmp_path: Path) -> None:
    assert port_owner(10911, proc=tmp_path) is None


# --- property files of RocketMQ -----------------------------------------------------------------------


@pytest.mark.feature("E10")
def test_it_starts_with_the_property_file_of_a_real_broker(tmp_path: Path) -> None:
    """The delay levels of the file are in force, and keys without a meaning are listed with their reasons."""
    conf = tmp_path / "single-master.properties"
    conf.write_text(
        "brokerClusterName = DefaultCluster\nbrokerName = broker-m\nbrokerId = 0\n"
        "messageDelayLevel = 90s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h\n",
        "utf-8",
    )

    with BrokerProcess(tmp_path, "-c", str(conf)) as broker:
        with Tool(broker.name_server) as tool:
            info = ClusterInfo.decode(tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body)
        with RemoteBroker(RemoteSettings(name_servers=(str(broker.name_server),))) as client:
            client.sends.send(Message("orders", b"x", properties={Property.DELAY: "1"}))
            [pending] = client.delayed.pending(PendingQuery(topic="orders")).messages
        _, _, errors = broker.stop()

    assert list(info.broker_addr_table) == ["broker-m"]
    assert pending.deliver_ms - pending.store_timestamp == 90_000
    assert "1 key has no meaning here\n  brokerId: this broker has no replicas" in errors


def test_an_unknown_key_in_a_property_file_ends_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerNam = x\n", "utf-8")

    result = CommandLine("", tmp_path, capsys).plain("broker", "-c", str(conf))

    assert result.code == 1
    assert "broker.conf:1: brokerNam is not a key of RocketMQ's broker; did you mean 'brokerName'?" in result.errors
