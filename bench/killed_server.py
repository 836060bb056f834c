"""The server of `bench.grpc_kill`: ``mqtemplate broker --grpc`` in a process, with its topics and groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench.grpc_ledger import Kind, Ledger
from bench.peer.rocketmq import free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.server import BrokerServer, BrokerServerSettings

NORMAL, FIFO, DELAYED, TRANSACTIONS = "normal", "fifo", "delayed", "transactions"
PYTHON, PYTHON_SENT = "python", "python-sent"
KINDS = {
    NORMAL: "NORMAL",
    FIFO: "FIFO",
    DELAYED: "DELAY",
    TRANSACTIONS: "TRANSACTION",
    PYTHON: "NORMAL",
    PYTHON_SENT: "NORMAL",
}
"""Topics of the clients, with the type of their messages. The group of a topic has the name of the topic."""
RETRIES = {NORMAL: 2}
STOP_S = 60.0
"""Time in which a process or thread must end."""
_ANSWER_S = 2.0
_CONFIGURATION = """\
mqtemplate:
  broker:
    flush-disk-type: SYNC_FLUSH
    transaction-timeout-ms: 500
    transaction-check-interval-ms: 1000
    mapped-file-size-commit-log: 4194304
    mapped-file-size-consume-queue: 20000
    checkpoint-interval-ms: 200
  logging:
    format: json
"""
SMALL = EmbeddedSettings(mapped_file_size_commit_log=4 << 20, mapped_file_size_consume_queue=20_000)


def now_ms() -> int:
    """Return the time of the wall clock, which the server uses as well."""
    return int(time.time() * 1_000)


class KilledServer:
    """The server, in a process that is killed and started again.

    Attributes:
        generation: Number of the kills and stops so far.
        is_up: It has started, and was not killed since.
        kill_after: Name of an action: the server is killed at once when a client has the answer to the next one.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.generation = 0
        self.is_up = False
        self.kill_after = ""
        self.address = HostAddress("127.0.0.1", free_port())
        self._ledger = ledger
        self._log = folder / "server.log"
        (folder / "application.yml").write_text(_CONFIGURATION)
        self._command = [
            *(sys.executable, "-m", "mqtemplate", "broker", "--config", str(folder), "--store", str(folder / "store")),
            *("--listen", f"127.0.0.1:{free_port()}", "--name-server", "127.0.0.1:0", "--grpc", str(self.address)),
        ]
        _create_topics(folder / "store")

    def start(self) -> None:
        """Start it, without waiting."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        """Wait until it listens."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "listens on" in line, f"the server did not start: {self._log.read_text()[-2_000:]}"
        self._ledger.ready_ms = now_ms()
        self.is_up = True

    def answered(self, action: str) -> None:
        """Note that a client has just got an answer."""
        if action and self.kill_after == action:
            self.kill_after = ""
            self.is_up = False
            self.generation += 1
            self._process.kill()

    def kill_after_answer(self, action: str) -> None:
        """Kill it right after the answer to an action, or after a while."""
        self.kill_after = action
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ANSWER_S)
        self.kill()

    def kill(self) -> None:
        """Kill it, wherever it is."""
        self.kill_after = ""
        self.is_up = False
        self.generation += 1
        self._process.kill()
        self._close()

    def stop(self) -> None:
        """Stop it by SIGTERM."""
        self.is_up = False
        self.generation += 1
        self._process.send_signal(signal.SIGTERM)
        self._close()
        if self._process.returncode != 0:
            self._ledger.fault(Kind.UNEXPECTED, f"SIGTERM: exit code {self._process.returncode}")

    def close(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            self.kill()

    def _close(self) -> None:
        self._process.wait(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def errors(self) -> list[str]:
        """Return the errors in its log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if '"level": "error"' in line or "Traceback" in line]


def _create_topics(store: Path) -> None:
    address = HostAddress("127.0.0.1", free_port())
    with (
        EmbeddedBroker(store, replace(SMALL, listen_host=address)) as broker,
        BrokerServer(broker, BrokerServerSettings(listen=address)) as server,
    ):
        for topic, kind in KINDS.items():
            attributes = {"message.type": kind}
            config = {"readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "attributes": attributes}
            server.topics.table.update(topic, config)
        server.groups.put(
            SubscriptionGroupConfig(
                group_name=topic, consume_message_orderly=topic == FIFO, retry_max_times=RETRIES.get(topic, 16)
            )
            for topic in KINDS
        )
