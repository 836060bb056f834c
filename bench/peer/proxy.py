"""RocketMQ's proxy on loopback, for clients that use gRPC. `make setup` does not fetch its packages."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

from bench.peer.fetch import fetch
from bench.peer.jvm import PeerProcess, command_line
from bench.peer.rocketmq import NameServer, RocketMQ, free_port


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


class Certificate(NamedTuple):
    """PEM files of a server: its certificate, and its private key without a password."""

    certificate: Path
    key: Path


class LocalProxy(RocketMQ):
    """RocketMQ's broker and proxy 5.5.0 in one process: the proxy's LOCAL mode.

    It accepts plain text, and TLS too if it has a certificate.

    Args:
        options: Values of the broker's configuration.
        proxy_options: Values of the proxy's configuration.

    Attributes:
        endpoint: ``host:port`` of its gRPC service, once started.
    """

    _STARTED: ClassVar[str] = "proxy started"

    def __init__(
        self,
        folder: Path,
        name_server: NameServer,
        options: Mapping[str, object] | None = None,
        *,
        proxy_options: Mapping[str, object] | None = None,
        certificate: Certificate | None = None,
        for_speed: bool = False,
    ) -> None:
        super().__init__(folder, name_server, options, for_speed=for_speed)
        self.endpoint = ""
        self._proxy_options = dict(proxy_options or {})
        self._certificate = certificate

    def _command(self, home: Path) -> list[str]:
        port = free_port()
        self.endpoint = f"127.0.0.1:{port}"
        settings: dict[str, object] = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": self._name_server.address,
            "localServeAddr": "127.0.0.1",
            "grpcServerPort": port,
        }
        if self._certificate:
            settings |= {
                "tlsTestModeEnable": False,
                "tlsCertPath": str(self._certificate.certificate),
                "tlsKeyPath": str(self._certificate.key),
            }
        (home / "proxy.json").write_text(json.dumps(settings | self._proxy_options), encoding="utf-8")
        arguments = ("Proxy", "-pc", f"{home}/proxy.json", "-pm", "local", "-bc", f"{home}/broker.conf")
        heap_mib = 2_048 if self._for_speed else 384
        has_tls = self._certificate is not None
        return command_line("proxy", home, "Guarded", *arguments, heap_mib=heap_mib, flags=self._flags(), tls=has_tls)
