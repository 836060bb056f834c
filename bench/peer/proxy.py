"""RocketMQ's proxy on loopback, for clients that use gRPC. `make setup` does not fetch its packages."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peer.fetch import fetch
from bench.peer.jvm import PeerProcess, command_line
from bench.peer.rocketmq import NameServer, free_port


def fetch_proxy() -> str | None:
    """Fetch the packages of the proxy if they are missing. Return the reason if that fails."""
    return fetch("proxy", "RocketMQ's proxy 5.5.0")


class Proxy:
    """RocketMQ's proxy 5.5.0 in its own process, without TLS, with the optimizing compiler.

    The broker must be registered with the name server before the start.

    Attributes:
        address: ``host:port`` of its gRPC service, once started.
    """

    def __init__(self, name_server: NameServer) -> None:
        self.address = ""
        self._name_server = name_server

    def __enter__(self) -> Self:
        home = Path(tempfile.mkdtemp(prefix="rocketmq-proxy-"))
        port = free_port()
        settings = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": self._name_server.address,
            "localServeAddr": "127.0.0.1",
            "grpcServerPort": port,
        }
        (home / "proxy.json").write_text(json.dumps(settings), encoding="utf-8")
        arguments = ("Proxy", "-pc", f"{home}/proxy.json", "-pm", "cluster")
        command = command_line("proxy", home, "Guarded", *arguments, heap_mib=1_024, flags=("-XX:+UseG1GC",), tls=True)
        self._process = PeerProcess("proxy", command, home)
        self._process.wait_for("proxy started")
        self.address = f"127.0.0.1:{port}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()  # The process has no state to save.
        if error is not None:
            error.add_note(f"output of RocketMQ's proxy:\n{self._process.tail()}")
        shutil.rmtree(self._process.home, ignore_errors=True)
