"""Settings of the gRPC protocol: addresses, and the package that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from mqtemplate.context.settings.broker import ServerSettings
from mqtemplate.message import HostAddress
from tests.programs import run_python


def test_the_addresses_are_texts_in_the_configuration() -> None:
    settings = ServerSettings(grpc_listen="127.0.0.1:8081", grpc_advertise="broker.example:18081")  # type: ignore[arg-type]

    assert settings.grpc_listen == HostAddress("127.0.0.1", 8081)
    assert settings.grpc_advertise == HostAddress("broker.example", 18081)


@pytest.mark.parametrize("text", ["", "none"])
def test_the_protocol_can_be_switched_off(text: str) -> None:
    assert ServerSettings(grpc_listen=text).grpc_listen is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"grpc_listen": "broker.example:8081"}, "must be a numeric address and a port"),
        ({"grpc_listen": "8081"}, "must be ip:port"),
        ({"grpc_listen": "127.0.0.1:10911"}, "which another protocol uses; give another port"),
        ({"grpc_listen": "0.0.0.0:8081"}, "say in 'grpc-advertise' the address"),
        ({"grpc_advertise": "127.0.0.1:8081"}, "is given, but 'grpc-listen' is not; set it too"),
    ],
    ids=range(5),
)
def test_addresses_that_contradict_each_other_are_refused(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ServerSettings(**settings)  # type: ignore[arg-type]

    assert text in str(caught.value)


PROGRAM = """
import sys
sys.modules["google.protobuf"] = None
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.server import BrokerServer, BrokerServerSettings
BrokerServer(EmbeddedBroker(None))
print(*[name for name in sys.modules if "grpc" in name or "http2" in name])
try:
    BrokerServer(EmbeddedBroker(None), BrokerServerSettings(grpc_listen=HostAddress("127.0.0.1", 0)))
except ConfigurationError as error:
    print(error)
"""


def test_without_protobuf_only_a_server_with_the_protocol_fails() -> None:
    """And a server without the protocol loads nothing of it."""
    loaded, error = run_python(Path("/"), "-c", PROGRAM).stdout.splitlines()

    assert loaded == ""
    assert error.startswith("grpc-listen is 127.0.0.1:0, but RocketMQ's gRPC protocol needs protobuf")
    assert "pip install" in error
