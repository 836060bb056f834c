"""SIGHUP and ``mqtemplate reload``: a server, and an application, read their configuration while they run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mqtemplate import MQApplication
from mqtemplate.cli import main
from mqtemplate.cli.commands.run import _accounts
from mqtemplate.clock import VirtualClock
from mqtemplate.context.settings.source import load_settings
from mqtemplate.message import HostAddress
from mqtemplate.remoting.identity import Credentials
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
from mqtemplate.running.reload import reload_of
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.local_address import LocalServerAddress
from tests.console.pages import MANAGEMENT_TOKEN
from tests.running.program import Program
from tests.server.process import BrokerProcess
from tests.server.tool import ANY_PORT, Tool, make_engine
from tests.waiting import eventually

SECRET = "a secret that is never shown"
LEVELS = "mqtemplate.broker.message-delay-level"
ACCOUNT = f"{{access-key: administrator, secret-key: {SECRET}, admin: true}}"

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")


def write(folder: Path, levels: str, level: str = "INFO", more: str = "") -> None:
    (folder / "application.yml").write_text(
        f"mqtemplate:\n  broker: {{message-delay-level: {levels}}}\n"
        f"  logging: {{level: {level}, format: json}}\n{more}",
        "utf-8",
    )


def levels_of(tool: Tool) -> str:
    """Return the delay levels in force."""
    lines = tool.request_ok(RequestCode.GET_BROKER_CONFIG).body.decode().splitlines()
    return dict(line.split("=", 1) for line in lines)["messageDelayLevel"]


def mqtemplate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mqtemplate", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_sighup_reads_the_configuration_and_the_connection_stays(tmp_path: Path) -> None:
    write(tmp_path, "1s 2s")
    with BrokerProcess(tmp_path) as broker, Tool(broker.address) as tool:
        before = levels_of(tool)
        write(tmp_path, "1s 2s 3s", more="  server: {cluster-name: other}\n")
        broker.process.send_signal(signal.SIGHUP)
        eventually(lambda: levels_of(tool) == "1s 2s 3s", "the new levels are in force")
        code, _, errors = broker.stop()

    assert before == "1s 2s"
    assert code == 0
    events = [json.loads(line) for line in errors.splitlines()]
    assert [LEVELS] in [event["changed"] for event in events if event["event"] == "config.reloaded"]
    needed = [event["keys"] for event in events if event["event"] == "config.restart_needed"]
    assert ["mqtemplate.server.cluster-name"] in needed


def test_levels_that_were_changed_by_request_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    write(tmp_path, "1s 2s")
    with BrokerProcess(tmp_path) as broker, Tool(broker.address) as tool:
        tool.request_ok(RequestCode.UPDATE_BROKER_CONFIG, None, b"messageDelayLevel=9s\n")
        broker.kill()

    with BrokerProcess(tmp_path) as again, Tool(again.address) as tool:
        assert levels_of(tool) == "9s"
        _, _, errors = again.stop()

    assert "delay_levels.change_restored" in errors


@pytest.mark.parametrize(
    ("result", "code", "lines", "errors"),
    [
        (ReloadedConfig(), 0, ["changed: nothing"], []),
        (
            ReloadedConfig(changed=["server.pem", LEVELS], needs_restart=["a.b", "c"]),
            0,
            [
                f"changed: server.pem, {LEVELS}",
                "a.b has changed, and needs a restart",
                "c has changed, and needs a restart",
            ],
            [],
        ),
        (
            ReloadedConfig(problems=["TLS: no file; write it"]),
            1,
            ["changed: nothing"],
            ["not changed: TLS: no file; write it"],
        ),
    ],
)
def test_the_command_shows_what_has_changed_and_what_has_not(
    capsys: pytest.CaptureFixture[str], result: ReloadedConfig, code: int, lines: list[str], errors: list[str]
) -> None:
    engine = make_engine(VirtualClock())
    reasons: list[str] = []

    def reload(reason: str) -> ReloadedConfig:
        reasons.append(reason)
        return result

    with LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT)) as cluster:
        cluster.broker.on_reload(reload)
        assert main(["reload", "-n", str(cluster.address)]) == code
        shown = capsys.readouterr()

    assert shown.out.splitlines() == [f"{cluster.address}: {line}" for line in lines]
    assert [line for line in shown.err.splitlines() if "remote." not in line] == [
        f"{cluster.address}: {line}" for line in errors
    ]
    assert reasons[0].startswith("request of 127.0.0.1:")


def test_a_server_of_a_program_has_no_configuration_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(make_engine(VirtualClock()), BrokerServerSettings(listen=ANY_PORT)) as cluster:
        code = main(["reload", "-n", str(cluster.address)])

    assert code == 4
    assert "this server was started by a program, which gave it its settings" in capsys.readouterr().err


def test_the_command_uses_the_account_in_the_file_that_application_and_server_share(tmp_path: Path) -> None:
    acl = f"  server: {{acl: {{enabled: true, accounts: [{ACCOUNT}]}}}}\n"
    client = f"rocketmq: {{producer: {{access-key: administrator, secret-key: {SECRET}}}}}\n"
    write(tmp_path, "1s", more=acl + client)
    with BrokerProcess(tmp_path) as broker:
        write(tmp_path, "2s", more=acl + client)
        done = mqtemplate(tmp_path, "reload", "--name-server", str(broker.name_server))
        write(tmp_path, "soon", more=acl + client)
        failed = mqtemplate(tmp_path.parent, "reload", "--name-server", str(broker.name_server))
        with Tool(broker.address, Credentials(access_key="administrator", secret_key=SECRET)) as tool:
            levels = levels_of(tool)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{broker.address}: changed: ")  # nothing, if the server has seen the file before
    assert levels == "2s"
    assert failed.returncode == 1  # it has no account there
    assert "configure the client with an access key" in failed.stderr
    assert SECRET not in done.stdout + done.stderr + failed.stderr


def test_the_command_ends_with_code_1_if_a_file_has_an_error(tmp_path: Path) -> None:
    write(tmp_path, "1s")
    (tmp_path / "elsewhere").mkdir()
    with BrokerProcess(tmp_path) as broker:
        write(tmp_path, "soon")
        failed = mqtemplate(tmp_path / "elsewhere", "reload", "-n", str(broker.name_server), "--json")

    assert failed.returncode == 1
    [(address, result)] = json.loads(failed.stdout).items()
    assert address == str(broker.address)
    assert result["changed"] == result["needs_restart"] == []
    assert f"application.yml:2: {LEVELS}" in result["problems"][0]


def test_the_command_needs_a_server(tmp_path: Path) -> None:
    refused = mqtemplate(tmp_path, "reload", "-n", "embedded:./store")

    assert refused.returncode == 4
    assert (
        f"no server of {tmp_path / 'store'} is known here; name its address (--name-server host:port)" in refused.stderr
    )


def test_the_server_stops_in_order_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """SIGHUP means a reload for a service. For a server in a terminal that is gone it is the end, as before."""
    ours, theirs = os.openpty()

    def log_in() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the tests run under nohup
        os.login_tty(theirs)

    broker = BrokerProcess(tmp_path)
    process = subprocess.Popen(broker._command, preexec_fn=log_in)  # noqa: PLW1509 (no threads)
    os.close(theirs)
    try:
        shown = b""
        while b"press Ctrl-C to stop" not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)  # the kernel sends SIGHUP to the leader of the session
        code = process.wait(120)
    finally:
        process.kill()
        process.wait()

    assert code == 0
    assert not (tmp_path / "store" / "abort").exists()


def test_an_application_reads_its_log_level_and_its_delay_levels_again(tmp_path: Path) -> None:
    broker = "rocketmq: {name-server: 'embedded:./store'}\n"
    write(tmp_path, "1s", more=broker)
    (tmp_path / "shop.py").write_text("from mqtemplate import MQApplication\napp = MQApplication()\n", "utf-8")
    with Program(tmp_path, "mqtemplate", "run", "shop:app") as program:
        program.wait_for("is running")
        write(tmp_path, "1s 2s", "DEBUG", more=broker)
        program.send(signal.SIGHUP)
        [line] = program.wait_for("^.*config.reloaded.*$")
        code = program.stop()

    assert json.loads(line)["changed"] == ["mqtemplate.logging.level", LEVELS]
    assert code == 0
    assert "broker.stopped" in program.output  # an event at DEBUG


def test_the_server_of_several_workers_reads_its_configuration_again(tmp_path: Path) -> None:
    """The command finds it by the folder of the application."""
    broker = "rocketmq: {name-server: 'embedded:./store'}\n"
    write(tmp_path, "1s", more=broker)
    (tmp_path / "shop.py").write_text("from mqtemplate import MQApplication\napp = MQApplication()\n", "utf-8")
    with Program(tmp_path, "mqtemplate", "run", "shop:app", "--workers", "2") as program:
        program.wait_for("is ready", 2)
        write(tmp_path, "1s 2s", more=broker)
        done = mqtemplate(tmp_path, "reload")
        [port] = program.wait_for(r"for the workers on 127.0.0.1:(\d+)")
        account = LocalServerAddress.read(tmp_path / "store")
        assert account is not None
        credentials = Credentials(access_key=account.access_key, secret_key=account.secret_key)
        with Tool(HostAddress("127.0.0.1", int(port)), credentials) as tool:
            levels = levels_of(tool)
        code = program.stop()

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"127.0.0.1:{port}: changed: ")
    assert levels == "1s 2s"
    assert code == 0


def test_the_command_reads_the_accounts_of_the_dashboard_of_its_workers_again(tmp_path: Path) -> None:
    """Also without a server of its own: the workers use a cluster, and the command serves the dashboard of all."""

    def write_accounts(name: str) -> None:
        account = f"{{access-key: {name}, secret-key: {SECRET}}}"
        (tmp_path / "application.yml").write_text(
            f"rocketmq: {{name-server: '127.0.0.1:9876'}}\n"
            f"mqtemplate: {{server: {{acl: {{enabled: true, accounts: [{account}]}}}}}}\n"
        )

    write_accounts("night-shift")
    with _accounts(load_settings(tmp_path, environment={}), None) as accounts:
        assert accounts is not None
        before = set(accounts.accounts)
        write_accounts("new-hand")
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: set(accounts.accounts) == {"new-hand"}, "the accounts are read again")

    assert before == {"night-shift"}


def test_the_command_reaches_an_application_by_its_actuator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Delay levels and accounts of an application in one process, as of a server."""

    def write_accounts(name: str, levels: str) -> None:
        acl = f"{{enabled: true, accounts: [{{access-key: {name}, secret-key: {SECRET}}}]}}"
        dashboard = f"{{enabled: true, port: {port}, token: {MANAGEMENT_TOKEN}, dashboard: {{enabled: true}}}}"
        more = f"  server: {{acl: {acl}}}\n  management: {dashboard}\nrocketmq: {{name-server: 'embedded:memory'}}\n"
        write(tmp_path, levels, more=more)

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    write_accounts("night-shift", "1s")
    with MQApplication(config_folder=tmp_path) as app:
        reload_of(app)
        write_accounts("new-hand", "1s 2s")
        codes = [main(["reload", "--url", f"http://127.0.0.1:{port}", "--config", str(tmp_path)])]
        accounts = set(app.get(AccessControl).accounts)
        write_accounts("new-hand", "soon")
        codes.append(main(["reload", "--url", f"http://127.0.0.1:{port}", "--config", str(tmp_path)]))
    shown = capsys.readouterr()

    assert codes == [0, 1]
    assert "application.yml:2: mqtemplate.broker.message-delay-level" in shown.err
    assert LEVELS in shown.out
    assert "mqtemplate.server.acl.accounts" in shown.out
    assert accounts == {"new-hand"}
