"""``python -m mqtemplate broker``: what it says, how it ends, and how it says that it cannot start."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mqtemplate.cli import main
from mqtemplate.cli.port_owner import port_owner
from mqtemplate.cli.say import say
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo
from mqtemplate.remoting.protocol.headers.group import GetMaxOffsetRequestHeader, OffsetResponseHeader
from mqtemplate.remoting.protocol.headers.message import SendMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_offset_msg_id
from mqtemplate.remoting.settings import Credentials
from tests.server.process import BrokerProcess
from tests.server.tool import Tool

SECRET = "a secret that nobody sees"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that is to end by itself."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "mqtemplate", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


# --- it runs ----------------------------------------------------------------------------------------


def test_it_says_in_one_line_where_it_listens_and_serves_both_doors(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--broker-name", "b1", "--cluster-name", "c1") as broker:
        with Tool(broker.name_server) as tool:
            info = ClusterInfo.decode(tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO).body)
        with Tool(broker.address) as tool:
            tool.send("orders")

        assert broker.line.startswith("b1 listens at 127.0.0.1:")
        assert broker.line.endswith(f", store {tmp_path / 'store'}; Ctrl-C stops it")
    assert info.cluster_addr_table == {"c1": ["b1"]}
    assert info.broker_addr_table["b1"].broker_addrs == {0: str(broker.address)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_and_what_was_sent_is_there_next_time(tmp_path: Path, number: signal.Signals) -> None:
    with BrokerProcess(tmp_path) as broker, Tool(broker.address) as tool:
        tool.send("orders")
        code, told, errors = broker.stop(number)

    assert code == 0, errors
    assert told.splitlines() == [
        f"stopping ({number.name}) ...",
        "stopped; all that was acknowledged is in the files",
    ]
    assert not (tmp_path / "store" / "abort").exists()  # the mark of a store that nobody closed
    with BrokerProcess(tmp_path) as again, Tool(again.address) as tool:
        header = GetMaxOffsetRequestHeader(topic="orders", queue_id=0)
        assert tool.request_ok(RequestCode.GET_MAX_OFFSET, header).header(OffsetResponseHeader).offset == 1


def test_application_yml_says_the_same_as_options(tmp_path: Path) -> None:
    """One file may serve the applications and their server: where those send is not the server's business."""
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

    with BrokerProcess(tmp_path) as broker, Tool(broker.address) as nobody:
        credentials = Credentials(access_key="shop-owner", secret_key=SECRET)
        with Tool(broker.address, credentials) as somebody:
            somebody.send("orders")
        refused = nobody.request(RequestCode.GET_BROKER_CLUSTER_INFO)
        _, told, errors = broker.stop()

    assert broker.line.startswith("from-the-file listens at ")
    assert refused.remark == "access is controlled here: give the client an access key and its secret key"
    assert SECRET not in told + errors


def test_message_ids_lead_to_the_broker_also_where_the_system_chose_its_port(tmp_path: Path) -> None:
    """Tools connect to the address that an id has in it."""
    with BrokerProcess(tmp_path, "--advertise", "127.0.0.1:0") as broker, Tool(broker.address) as tool:
        msg_id = tool.send("orders").header(SendMessageResponseHeader).msg_id

    assert decode_offset_msg_id(msg_id) == (broker.address, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_it_listens_at_an_ipv6_address(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--name-server", "none", listen="[::1]:0") as broker, Tool(broker.address) as tool:
        msg_id = tool.send("orders").header(SendMessageResponseHeader).msg_id

    assert broker.address.ip == "::1"
    assert decode_offset_msg_id(msg_id) == (broker.address, 0)


def test_without_a_door_of_its_own_the_name_server_is_the_broker(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--name-server", "none") as broker, Tool(broker.name_server) as tool:
        tool.request_ok(RequestCode.GET_BROKER_CLUSTER_INFO)

        assert broker.name_server == broker.address


def test_it_warns_when_others_can_reach_it_and_nobody_is_asked_who_he_is(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--advertise", "127.0.0.1:0", listen="0.0.0.0:0") as broker:
        _, _, errors = broker.stop()

    assert broker.address.ip == "127.0.0.1"
    assert (
        "warning: 0.0.0.0:0 can be reached from other machines, and access control is off: whoever reaches it may "
        "read and write everything; set mqtemplate.server.acl, or listen at 127.0.0.1"
    ) in errors


def test_on_loopback_there_is_nothing_to_warn_of(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        _, _, errors = broker.stop()

    assert "warning" not in errors


# --- it cannot start --------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named_with_its_owner(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as first:
        taken = str(first.address)
        second = run("broker", "--store", str(tmp_path / "b"), "--listen", taken, "--name-server", "none")

    assert second.returncode == 1
    assert f"{taken}" in second.stderr
    owner = f"process {first.process.pid} ("
    assert f"; {taken} is taken by {owner}" in second.stderr
    assert "): stop that, or choose another address with --listen" in second.stderr
    assert second.stdout == ""


def test_a_folder_that_is_in_use_is_named_with_its_owner(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as first:
        store = tmp_path / "store"
        second = run("broker", "--store", str(store), "--listen", "127.0.0.1:0", "--name-server", "none")

    assert second.returncode == 1
    assert f"error: {store} is in use by process {first.process.pid}; one process owns a store folder" in second.stderr


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
        (["--config", "nowhere"], "config_folder 'nowhere' is no folder; give the one that holds application.yml"),
    ],
)
def test_settings_that_cannot_be_are_told_with_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    code = main(["broker", *arguments])

    told = capsys.readouterr().err
    assert code == 2
    assert told.startswith("error: ")
    assert text in told
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
def test_mistakes_in_the_file_are_told_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, text: str
) -> None:
    (tmp_path / "application.yml").write_text(f"mqtemplate:\n  server:\n    {section}\n")

    code = main(["broker", "--config", str(tmp_path), "--listen", "127.0.0.1:0", "--name-server", "none"])

    told = capsys.readouterr().err
    assert code == 2
    assert "application.yml:3: " in told
    assert text in told
    assert "abcdefgh" not in told


def test_a_certificate_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "application.yml").write_text(
        "mqtemplate:\n  server:\n    tls: {mode: enforcing, cert-path: none.pem, key-path: none.pem}\n"
    )

    store = tmp_path / "store"
    code = main(["broker", "--config", str(tmp_path), "--store", str(store), "--listen", "127.0.0.1:0"])

    assert code == 2
    assert "none.pem" in capsys.readouterr().err


# --- help -------------------------------------------------------------------------------------------


def test_help_tells_the_commands_and_their_options() -> None:
    top, broker = run("--help"), run("broker", "--help")

    assert (top.returncode, broker.returncode) == (0, 0)
    assert "broker  " in top.stdout
    assert "run a broker and its name server" in top.stdout
    for option in ("--store DIR", "--listen IP:PORT", "--name-server IP:PORT", "--advertise", "--config", "--profile"):
        assert option in broker.stdout
    assert "mqtemplate.server.*" in broker.stdout


def test_a_command_must_be_given() -> None:
    done = run()

    assert done.returncode == 2
    assert re.search(r"the following arguments are required: COMMAND", done.stderr)


def test_the_owner_of_a_port_is_found() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = HostAddress(*listening.getsockname())
        assert (port_owner(address.port) or "").startswith(f"process {os.getpid()} (")

    assert port_owner(address.port) is None


def test_what_a_terminal_cannot_show_is_told_by_its_number() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    say("store /home/jörg", stream)

    stream.seek(0)
    assert stream.read() == "store /home/j\\xf6rg\n"


def test_it_ends_cleanly_though_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """As in ``python -m mqtemplate broker | head -1``."""
    with BrokerProcess(tmp_path) as broker:
        assert broker.process.stdout is not None
        broker.process.stdout.close()
        broker.process.terminate()
        assert broker.process.stderr is not None
        errors = broker.process.stderr.read()
        code = broker.process.wait(30)
        broker.process.stderr.close()

    assert code == 0, errors
    assert "BrokenPipe" not in errors


def test_where_the_machine_does_not_tell_nobody_owns_a_port(tmp_path: Path) -> None:
    assert port_owner(10911, proc=tmp_path) is None
