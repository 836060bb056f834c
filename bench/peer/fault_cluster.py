"""Clusters whose parts fail: two name servers, two masters and a replica of RocketMQ; or one server of this library.

All have fixed ports, so that a broker comes back at its address; `RocketMQCluster.move` gives it another one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from bench.peer.jvm import PeerError
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.clock import SystemClock
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.bodies.route import ClusterInfo

_REGISTRATION_S = 60.0


class FaultCluster(Protocol):
    """A cluster that a trial starts, and lets fail.

    Attributes:
        brokers: Names of the masters.
        name_servers: ``host:port;host:port``, once started.
    """

    brokers: tuple[str, ...]
    name_servers: str

    def start(self, name: str) -> None:
        """Start a broker; return when it has registered at the name servers."""

    def kill(self, name: str) -> None:
        """Kill a master with SIGKILL."""

    def stop(self, name: str) -> None:
        """Stop a master cleanly, as in a rolling restart."""

    def pause(self, name: str) -> None:
        """Stop the process of a master with SIGSTOP: its connections stay open, and nothing answers."""

    def resume(self, name: str) -> None:
        """Let a paused process go on."""


class _Names(NamedTuple):
    """The name servers, as `RocketMQ` needs them."""

    address: str
    version: str


class RocketMQCluster:
    """A cluster of RocketMQ. Its brokers are "broker-a" and "broker-b"; the replica belongs to "broker-a"."""

    brokers: tuple[str, ...] = ("broker-a", "broker-b")

    def __init__(self, folder: Path, *, has_replica: bool = True) -> None:
        self.name_servers = ""
        self._folder = folder
        self._has_replica = has_replica
        self._stack = ExitStack()
        self._ports = {name: free_port() for name in self.brokers}
        self._running: dict[str, RocketMQ] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            names = [stack.enter_context(NameServer()) for _ in range(2)]
            self.name_servers = ";".join(each.address for each in names)
            self._names = _Names(self.name_servers, names[0].version)
            self._stack = stack.pop_all()
        for name in self.brokers:
            self.start(name)
        if self._has_replica:
            options = {"brokerName": "broker-a", "brokerId": 1, "brokerRole": "SLAVE"}
            self._stack.enter_context(RocketMQ(self._folder / "replica", self._names, options))  # type: ignore[arg-type]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for broker in self._running.values():
            broker.__exit__(kind, error, tb)
        self._stack.close()

    # --- faults --------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        options = {"brokerName": name, "listenPort": self._ports[name]}
        broker = RocketMQ(self._folder / name, self._names, options)  # type: ignore[arg-type]
        broker.__enter__()
        self._running[name] = broker
        self._await_registration(name)

    def _await_registration(self, name: str) -> None:
        """Wait until each name server has the broker: often that is not before 10 s after its start."""
        address = f"127.0.0.1:{self._ports[name]}"
        client = RemotingClient(RemotingClientSettings(), SystemClock())
        try:
            deadline = time.monotonic() + _REGISTRATION_S
            while not all(_has_master(client, each, name, address) for each in self.name_servers.split(";")):
                if time.monotonic() > deadline:
                    raise PeerError(f"{name} is not registered at the name servers within {_REGISTRATION_S:.0f} s")
                time.sleep(0.05)
        finally:
            client.close()

    def kill(self, name: str) -> None:
        self._running.pop(name).__exit__(None, None, None)

    def stop(self, name: str) -> None:
        self._running[name].stop()
        self.kill(name)

    def move(self, name: str) -> None:
        """Stop a master and start it at another port, as Kubernetes does with another address."""
        self.stop(name)
        self._ports[name] = free_port()
        self.start(name)

    def pause(self, name: str) -> None:
        os.kill(self._running[name].pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        os.kill(self._running[name].pid, signal.SIGCONT)


class OurServer:
    """One server of this library: name server and broker in one process."""

    brokers: tuple[str, ...] = ("broker-a",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._broker_port, names_port = free_port(), free_port()
        self.name_servers = f"127.0.0.1:{names_port}"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        (self._folder / "application.yml").write_text("mqtemplate:\n  logging:\n    level: WARNING\n")
        self.start("broker-a")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill("broker-a")

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "mqtemplate", "broker", "--config", str(self._folder)]
        command += ["--store", str(self._folder / "store"), "--listen", f"127.0.0.1:{self._broker_port}"]
        command += ["--name-server", self.name_servers]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise PeerError("the server ended instead of starting")

    def kill(self, name: str) -> None:
        self._end(signal.SIGKILL)

    def stop(self, name: str) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.communicate()
            self._process = None

    def pause(self, name: str) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _has_master(client: RemotingClient, name_server: str, name: str, address: str) -> bool:
    response = client.invoke(name_server, RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO), 10_000)
    found = ClusterInfo.decode(response.body).broker_addr_table.get(name)
    return found is not None and found.broker_addrs.get(0) == address
