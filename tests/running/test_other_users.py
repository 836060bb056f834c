"""What other users of the machine can do to an application: neither its files nor its ports are open to them.

The requests of another user come from a process with another uid, so these tests need root.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.cli import main
from mqtemplate.processes import write_private
from mqtemplate.remoting.protocol.codec import decode_command, encode_command
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from tests.running.other_user import answers_to_other_user, needs_root, open_to_others, public_folder
from tests.running.program import Program
from tests.waiting import eventually

if TYPE_CHECKING:
    from mqtemplate.server.local_address import LocalServerAddress

APP = """
from mqtemplate import MQApplication, message_listener

@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None:
    print(f"billed {order}", flush=True)

app = MQApplication(__name__)
"""
CONFIGURATION = "rocketmq: {name-server: 'embedded:./store'}\n"
BROKER = re.compile(r"^broker broker-a for the workers on ([\d.]+:\d+), its name server on ([\d.]+:\d+),", re.MULTILINE)
_CHANGES = (
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.UPDATE_BROKER_CONFIG,
    RequestCode.RECALL_MESSAGE,
)


@contextmanager
def program_folder() -> Iterator[Path]:
    before = os.umask(0)
    try:
        with public_folder() as folder:
            (folder / "shop.py").write_text(APP, "utf-8")
            (folder / "application.yml").write_text(CONFIGURATION, "utf-8")
            yield folder
    finally:
        os.umask(before)


@pytest.fixture
def shop() -> Iterator[Path]:
    """A folder with a program that all users can enter; the process that runs it has no protection by its umask."""
    with program_folder() as folder:
        yield folder


@dataclass(frozen=True)
class Running:
    """A program with two workers, its folder, and the addresses that it printed."""

    folder: Path
    program: Program
    broker: str
    name_server: str


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with program_folder() as folder, workers(folder) as program:
        yield Running(folder, program, *addresses(program))
        program.stop()


def workers(folder: Path) -> Program:
    return Program(folder, "mqtemplate", "run", "shop:app", "--workers", "2")


def addresses(program: Program) -> tuple[str, str]:
    program.wait_for(r"^worker \d \(process \d+\) is ready$", 2)
    [(broker, name_server)] = BROKER.findall(program.output)
    return broker, name_server


def account_in(store: Path) -> LocalServerAddress | None:
    from mqtemplate.server.local_address import LocalServerAddress

    return LocalServerAddress.read(store)


def descendants(pid: int) -> list[int]:
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [pid, *(each for child in children.stdout.split() for each in descendants(int(child)))]


def listening_ports(pids: list[int]) -> set[int]:
    """Return the TCP ports at which the processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(file.readlink()))
            except FileNotFoundError:  # it was closed meanwhile
                continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


@needs_root
def test_the_broker_of_workers_answers_no_request_of_another_user(running: Running) -> None:
    """Of no kind, at any port at which one of the processes listens. On a name server most are of no meaning."""
    codes, refused = list(RequestCode), set[tuple[int, RequestCode]]()
    frames = [encode_command(RemotingCommand.request(code, None, b"{}")) for code in codes]
    ports = {int(each.rpartition(":")[2]) for each in (running.broker, running.name_server)}

    assert listening_ports(descendants(running.program.process.pid)) == ports
    for port in ports:
        for code, answer in zip(codes, answers_to_other_user(port, frames), strict=True):
            response = decode_command(answer)
            refused |= {(port, code)} if "access control is enabled" in (response.remark or "") else set()
            assert response.code in (ResponseCode.NO_PERMISSION, ResponseCode.REQUEST_CODE_NOT_SUPPORTED), code
            assert not response.body, code
    assert {port for port, code in refused if code is RequestCode.GET_ROUTEINFO_BY_TOPIC} == ports
    assert {code for _, code in refused} >= {RequestCode.SEND_MESSAGE, RequestCode.PULL_MESSAGE, *_CHANGES}


@needs_root
def test_no_file_of_the_application_is_open_to_another_user(running: Running) -> None:
    assert open_to_others(running.folder / "store") == []


def test_the_account_of_the_workers_is_in_no_command_line_and_no_output(running: Running) -> None:
    """All users see the arguments of a process, and the output may be a log that others read."""
    account = account_in(running.folder / "store")
    assert account is not None
    pids = descendants(running.program.process.pid)
    shown = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids]
    environments = [Path(f"/proc/{pid}/environ").read_bytes().decode() for pid in pids]

    assert len(shown) == 3
    assert all("shop:app" in each for each in shown[1:])
    assert account.secret_key not in "".join([*shown, *environments, running.program.output])


def test_commands_of_the_same_user_find_the_account_in_the_store(
    running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed address works in the folder of the application, and in no other one."""
    monkeypatch.chdir(running.folder)
    assert main(["send", "orders", "4466", "--name-server", running.name_server]) == 0
    running.program.wait_for("^billed 4466$")
    monkeypatch.chdir("/")
    assert main(["send", "orders", "4467", "--name-server", running.name_server]) == 1

    assert "access control is enabled: configure the client with an access key" in capsys.readouterr().err


def test_accounts_of_the_configuration_work_beside_that_of_the_workers(shop: Path) -> None:
    """For other programs, such as a web server, that use the broker of the workers."""
    account = "{access-key: shop-web, secret-key: one-two-three, default-topic-perm: PUB, default-group-perm: PUB}"
    acl = f"mqtemplate: {{server: {{acl: {{enabled: true, accounts: [{account}]}}}}}}\n"
    (shop / "application.yml").write_text(CONFIGURATION + acl, "utf-8")
    web = shop / "web"
    web.mkdir()
    with workers(shop) as program:
        _, name_server = addresses(program)
        keys = "{access-key: shop-web, secret-key: one-two-three}"
        (web / "application.yml").write_text(f"rocketmq: {{name-server: '{name_server}', producer: {keys}}}", "utf-8")
        assert main(["send", "orders", "4466", "--config", str(web)]) == 0
        program.wait_for("^billed 4466$")
        program.stop()


def test_access_control_can_be_switched_off_and_a_warning_says_what_that_means(shop: Path) -> None:
    off = "mqtemplate: {server: {acl: {enabled: false}}}\n"
    (shop / "application.yml").write_text(CONFIGURATION + off, "utf-8")
    with workers(shop) as program:
        _, name_server = addresses(program)
        assert main(["send", "orders", "4466", "--name-server", name_server, "--config", "/"]) == 0
        program.wait_for("^billed 4466$")
        program.stop()

    assert "warning: mqtemplate.server.acl.enabled is false: every user of this machine can read" in program.output


@pytest.mark.thorough
def test_an_account_of_a_process_that_was_killed_is_of_no_use(shop: Path) -> None:
    """The file remains. The next start creates another account, and replaces it."""
    with workers(shop) as program:
        addresses(program)
        before = account_in(shop / "store")
        program.process.kill()
        pids = [int(pid) for pid in re.findall(r"process (\d+)\) is ready", program.output)]
        eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the workers ended")
    with workers(shop) as program:
        addresses(program)
        after = account_in(shop / "store")
        program.stop()

    assert account_in(shop / "store") is None
    assert before is not None
    assert after is not None
    assert (before.access_key, before.secret_key) != (after.access_key, after.secret_key)


def test_a_store_in_a_folder_of_others_is_private(shop: Path) -> None:
    """Without a umask, and also where a folder above it has to be created."""
    with EmbeddedBroker(shop / "data" / "store"):
        pass

    modes = {path: path.stat().st_mode & 0o077 for path in (shop / "data" / "store").rglob("*")}
    assert {path for path, mode in modes.items() if mode} == set()
    assert (shop / "data" / "store").stat().st_mode & 0o077 == 0


def test_files_beside_a_store_are_private_too(shop: Path) -> None:
    """Offsets of broadcasting members, progress and plans of Spark listeners, accounts: they name topics and groups."""
    write_private(shop / "state" / "billing" / "offsets.json", b"{}")
    written = shop / "state" / "billing" / "offsets.json"

    assert written.read_bytes() == b"{}"
    assert [path.stat().st_mode & 0o777 for path in (written, written.parent)] == [0o600, 0o700]
    assert [path.name for path in written.parent.iterdir()] == ["offsets.json"]


def test_a_private_file_is_not_written_through_a_link(shop: Path) -> None:
    """Another user may have put one there, if the folder is open to all."""
    (shop / "target").write_text("unchanged", "utf-8")
    (shop / "file.json").symlink_to(shop / "target")

    write_private(shop / "file.json", b"{}")

    assert (shop / "target").read_text("utf-8") == "unchanged"
    assert not (shop / "file.json").is_symlink()


def test_the_jvm_of_spark_needs_a_secret_at_its_ports() -> None:
    """The driver listens on ports of 127.0.0.1, for executors that a local session does not have."""
    pytest.importorskip("pyspark", reason="the session needs PySpark")
    from mqtemplate.spark.driver.sessions import _of_master

    assert _of_master("local[*]")["spark.authenticate"] == "true"
    assert _of_master("local[2]")["spark.driver.bindAddress"] == "127.0.0.1"
    assert "spark.authenticate" not in _of_master("spark://cluster:7077")  # the cluster has a secret of its own
