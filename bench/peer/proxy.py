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
from bench.peer.jvm import QUICK_START, PeerProcess, command_line
from bench.peer.rocketmq import NameServer, RocketMQ, free_port


def fetch_proxy() -> str | None:
    """Fetch the packages of the proxy if they are missing. Return the reason if that fails."""
    return fetch("proxy", "RocketMQ's proxy 5.5.0")


class Certificate(NamedTuple):
    """PEM files of a server: its certificate, and its private key without a password."""

    certificate: Path
    key: Path


def _write_settings(
    home: Path, name_server: NameServer, certificate: Certificate | None, options: Mapping[str, object]
) -> str:
    """Write the configuration of a proxy to its folder, and return the address of its gRPC service."""
    port = free_port()
    settings: dict[str, object] = {
        "rocketMQClusterName": "DefaultCluster",
        "namesrvAddr": name_server.address,
        "localServeAddr": "127.0.0.1",
        "grpcServerPort": port,
    }
    if certificate:
        settings |= {
            "tlsTestModeEnable": False,
            "tlsCertPath": str(certificate.certificate),
            "tlsKeyPath": str(certificate.key),
        }
    (home / "proxy.json").write_text(json.dumps(settings | options), encoding="utf-8")
    return f"127.0.0.1:{port}"


class Proxy:
    """RocketMQ's proxy 5.5.0 in its own process, beside the brokers of a name server: the proxy's CLUSTER mode.

    The broker must be registered with the name server before the start. It accepts plain text, and TLS too if it has a
    certificate.

    Args:
        options: Values of the proxy's configuration.
        for_speed: Use a larger heap and the optimizing compiler. Otherwise it starts faster.

    Attributes:
        address: ``host:port`` of its gRPC service, once started.
    """

    def __init__(
        self,
        name_server: NameServer,
        options: Mapping[str, object] | None = None,
        *,
        certificate: Certificate | None = None,
        for_speed: bool = False,
    ) -> None:
        self.address = ""
        self._name_server = name_server
        self._options = dict(options or {})
        self._certificate = certificate
        self._for_speed = for_speed

    def __enter__(self) -> Self:
        home = Path(tempfile.mkdtemp(prefix="rocketmq-proxy-"))
        self.address = _write_settings(home, self._name_server, self._certificate, self._options)
        arguments = ("Proxy", "-pc", f"{home}/proxy.json", "-pm", "cluster")
        heap_mib, flags = (1_024, ("-XX:+UseG1GC",)) if self._for_speed else (256, QUICK_START)
        command = command_line("proxy", home, "Guarded", *arguments, heap_mib=heap_mib, flags=flags, tls=True)
        self._process = PeerProcess("proxy", command, home)
        self._process.wait_for("proxy started")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()  # The process has no state to save.
        if error is not None:
            error.add_note(f"output of RocketMQ's proxy:\n{self._process.tail()}")
        shutil.rmtree(self._process.home, ignore_errors=True)


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
        self.endpoint = _write_settings(home, self._name_server, self._certificate, self._proxy_options)
        arguments = ("Proxy", "-pc", f"{home}/proxy.json", "-pm", "local", "-bc", f"{home}/broker.conf")
        heap_mib = 2_048 if self._for_speed else 384
        has_tls = self._certificate is not None
        return command_line("proxy", home, "Guarded", *arguments, heap_mib=heap_mib, flags=self._flags(), tls=has_tls)
