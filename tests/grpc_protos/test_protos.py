"""Message classes of RocketMQ's gRPC protocol."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

from mqtemplate.grpc_protos import enums, protos
from mqtemplate.grpc_protos.enums import Code, GrpcMessageType
from tests.programs import run_python

ENUMS = [
    enums.Code,
    enums.GrpcMessageType,
    enums.ClientType,
    enums.Permission,
    enums.FilterType,
    enums.AddressScheme,
    enums.DigestType,
    enums.Encoding,
    enums.TransactionResolution,
    enums.TransactionSource,
]


def test_a_message_survives_its_bytes() -> None:
    sent = protos.SendMessageRequest()
    message = sent.messages.add(body=b"paid")
    message.topic.name = "orders"
    message.system_properties.message_type = GrpcMessageType.DELAY
    message.system_properties.delivery_timestamp.FromMilliseconds(1_700_000_000_123)

    read = protos.SendMessageRequest.FromString(sent.SerializeToString()).messages[0]

    assert (read.topic.name, read.body, read.system_properties.message_type) == ("orders", b"paid", 3)
    assert read.system_properties.delivery_timestamp.ToMilliseconds() == 1_700_000_000_123


def test_a_duration_has_the_helpers_of_protobuf() -> None:
    duration = protos.Duration()
    duration.FromMilliseconds(1_500)

    settings = protos.Settings(request_timeout=duration)

    assert settings.request_timeout.ToMilliseconds() == 1_500


def test_the_descriptors_are_read_during_the_import() -> None:
    """Threads that use the first messages at the same time must not read them twice: the classes would differ."""
    program = """
from pathlib import Path
from mqtemplate.grpc_protos import protos
Path.read_bytes = None
print(protos.Settings.DESCRIPTOR.full_name)
"""
    assert run_python(Path("/"), "-c", program).stdout == "apache.rocketmq.v2.Settings\n"


def test_the_classes_are_not_in_the_default_pool() -> None:
    """RocketMQ's Python client registers the same names there, and can be used in the same process."""
    assert protos.Settings.DESCRIPTOR.full_name == "apache.rocketmq.v2.Settings"

    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("apache.rocketmq.v2.Settings")


def test_an_unknown_message_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="apache.rocketmq.v2 has no message 'SendMessagesRequest'"):
        _ = protos.SendMessagesRequest


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_the_enumerations_are_those_of_the_protocol(enum: type[enums.IntEnum]) -> None:
    name = enum.__name__.removeprefix("Grpc")
    declared = protos.pool().FindEnumTypeByName(f"apache.rocketmq.v2.{name}")

    assert {each.name: each.value for each in enum} == {each.name: each.number for each in declared.values}


def test_every_method_of_the_service_has_a_path() -> None:
    service = protos.pool().FindServiceByName(protos.SERVICE)

    assert protos.method_path("SendMessage") == "/apache.rocketmq.v2.MessagingService/SendMessage"
    assert {each.name for each in service.methods} >= {"QueryRoute", "ReceiveMessage", "Telemetry", "RecallMessage"}
    assert Code.OK == 20000


def test_the_descriptor_set_is_made_from_the_proto_files(tmp_path: Path) -> None:
    if find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed, which has protoc")
    made = tmp_path / "made.pb"

    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_imports"),
            f"--descriptor_set_out={made}",
            "apache/rocketmq/v2/service.proto",
        ],
        cwd=protos.DESCRIPTOR_SET.parent,
        check=True,
        timeout=60,
    )

    assert made.read_bytes() == protos.DESCRIPTOR_SET.read_bytes()


def test_without_protobuf_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["google.protobuf"] = None
try:
    import mqtemplate.grpc_protos.protos
except ModuleNotFoundError as error:
    print(error)
"""

    text = run_python(Path("/"), "-c", program).stdout

    assert text.startswith("RocketMQ's gRPC protocol needs protobuf")
    assert "pip install" in text
