"""Servers for RocketMQ's clients: this project's server in its own process, and RocketMQ's."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import pytest

from bench.peer.jvm import unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.remoting import Credentials
from mqtemplate.store.settings import FlushDiskType
from tests.operations.brokers import create_dead_letters, fill
from tests.waiting import eventually

REAL = "REAL_ROCKETMQ"
"""Environment variable. With the value 1 the client programs run with RocketMQ's server too, which takes some minutes.

That tests the programs, not this project's server.
"""

ADMINISTRATOR = Credentials(access_key="administrator", secret_key="secret-of-administrator")
"""Account of `guarded_server` that creates topics."""
ACCOUNT = Credentials(access_key="shop-account", secret_key="secret-of-the-shop")
"""Account of `guarded_server` with rights to all topics and groups, which is not an administrator."""

_LEVELS = "1s 2s 5s"
_TRANSACTION_MS = 1_000
_START_SECONDS = 60
_STOP_SECONDS = 60


class Server(Protocol):
    """A name server and its broker."""

    @property
    def address(self) -> str:
        """``host:port`` of the name server."""


def server_names() -> list[str]:
    """Return the servers to test: "mqtemplate", and "rocketmq" if the environment requests it."""
    return ["mqtemplate", "rocketmq"] if os.environ.get(REAL) == "1" else ["mqtemplate"]


@contextmanager
def rocketmq_server(folder: Path) -> Iterator[Server]:
    """Run RocketMQ's server with short intervals for transactions."""
    options = {
        "messageDelayLevel": _LEVELS,
        "transactionTimeOut": _TRANSACTION_MS,
        "transactionCheckInterval": _TRANSACTION_MS,
    }
    with NameServer() as name_server, RocketMQ(folder, name_server, options):
        yield name_server


@contextmanager
def guarded_server(name: str, folder: Path) -> Iterator[Server]:
    """Run a server of `server_names` with access control and the accounts `ADMINISTRATOR` and `ACCOUNT`."""
    if name == "mqtemplate":
        with BrokerProcess(folder, acl=accounts()) as server:
            yield server
        return
    # RocketMQ checks the signatures only: its rights are data that the broker must already run to receive.
    package = "org.apache.rocketmq.auth.authentication.provider"
    user = {"username": ACCOUNT.access_key, "password": ACCOUNT.secret_key, "userType": "Super"}
    options = {
        "messageDelayLevel": _LEVELS,
        "authenticationEnabled": "true",
        "authenticationProvider": f"{package}.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{package}.LocalAuthenticationMetadataProvider",
        "authConfigPath": folder / "auth",
        "initAuthenticationUser": json.dumps(user),
        "innerClientAuthenticationCredentials": json.dumps(
            {"accessKey": ACCOUNT.access_key, "secretKey": ACCOUNT.secret_key}
        ),
    }
    with NameServer() as name_server, RocketMQ(folder / "store", name_server, options):
        yield name_server


def accounts() -> Mapping[str, object]:
    """Return the section ``acl`` with the accounts `ADMINISTRATOR` and `ACCOUNT`."""
    found = [
        _account(ADMINISTRATOR, admin=True),
        _account(ACCOUNT, default_topic_perm="PUB|SUB", default_group_perm="SUB"),
    ]
    return {"enabled": True, "accounts": found}


def _account(credentials: Credentials, **rights: object) -> dict[str, object]:
    rights = {name.replace("_", "-"): value for name, value in rights.items()}
    return {"access-key": credentials.access_key, "secret-key": credentials.secret_key, **rights}


@contextmanager
def filled_rocketmq(folder: Path) -> Iterator[str]:
    """Run RocketMQ with the messages of the tests of commands; yield the address of its name server.

    Its store directory is ``store`` in *folder*.
    """
    if reason := unavailable_reason():
        pytest.skip(reason)
    options = {"recallMessageEnable": "true", "haListenPort": free_port()}
    with NameServer() as names, RocketMQ(folder / "store", names, options):
        settings = RemoteSettings(name_servers=(names.address,), offset_path=folder / "offsets")
        eventually(lambda: is_registered(settings), "the broker has registered", timeout_s=90)
        with RemoteBroker(settings) as client:
            fill(client)
            create_dead_letters(client)
        yield names.address


def is_registered(settings: RemoteSettings) -> bool:
    """Return True if the broker is known to its name server. A client looks it up once, when it starts."""
    with RemoteBroker(settings) as broker:
        return broker.name == "broker-a"


class BrokerProcess:
    """Process of ``python -m mqtemplate broker`` with a store folder and free ports.

    It is stopped cleanly at the end of the block, unless it was killed.

    Args:
        acl: The section ``mqtemplate.server.acl`` of its configuration.
        options: Other values of the section ``mqtemplate.server``.

    Attributes:
        address: ``host:port`` of its name server, once started.
    """

    def __init__(
        self,
        folder: Path,
        *,
        flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH,
        acl: Mapping[str, object] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self._folder = folder
        self._flush_disk_type = flush_disk_type
        self._server = dict(options or {}) | ({"acl": dict(acl)} if acl else {})
        self.address = ""

    def __enter__(self) -> Self:
        self._home = tempfile.TemporaryDirectory(prefix="mqtemplate-server-")
        self._log = Path(self._home.name, "server.log")
        self._write_settings()
        any_port = "127.0.0.1:0"
        options = ["--store", str(self._folder), "--listen", any_port, "--name-server", any_port]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mqtemplate", "broker", *options, "--config", self._home.name],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.address = self._printed_address()
        return self

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _write_settings(self) -> None:
        settings = {
            "message-delay-level": _LEVELS,
            "transaction-timeout-ms": _TRANSACTION_MS,
            "transaction-check-interval-ms": _TRANSACTION_MS,
            "flush-disk-type": self._flush_disk_type.value,
        }
        sections: dict[str, object] = {"logging": {"level": "WARNING"}, "broker": settings}
        if self._server:
            sections["server"] = self._server
        # JSON is YAML.
        Path(self._home.name, "application.yml").write_text(json.dumps({"mqtemplate": sections}))

    def _printed_address(self) -> str:
        """Return the printed address. Read in a thread, so that a command without output is detected."""
        lines: queue.Queue[str] = queue.Queue()
        output = self._process.stdout
        assert output is not None
        threading.Thread(target=lambda: lines.put(output.readline()), daemon=True).start()
        try:
            line = lines.get(timeout=_START_SECONDS)
        except queue.Empty:
            line = ""
        found = re.search(r"its name server on (\S+?:\d+),", line)
        if found is None:
            self.kill()
            raise AssertionError(f"the server did not start; it printed {line!r} and logged:\n{self._log_tail()}")
        return found[1]

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def kill(self) -> None:
        """Kill the process with SIGKILL, as in a crash."""
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._process.terminate()
            self._process.wait(_STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.communicate()
            if error is not None:
                error.add_note(f"log of the server:\n{self._log_tail()}")
            self._home.cleanup()
