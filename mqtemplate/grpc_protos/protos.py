"""The message classes of ``apache.rocketmq.v2``, by name: ``protos.SendMessageRequest``.

They come from a descriptor set in a pool of their own. The default pool of protobuf refuses to load the same names
from two files, and RocketMQ's own Python client loads them there; with a private pool both run in one process. No
module is generated, so any version of protobuf will do that has `message_factory.GetMessageClass`.

protoc writes ``messaging_service.pb`` from the ``.proto`` files beside it, which are those of ``apache/rocketmq-apis``
(Apache License 2.0), in this folder by::

    python -m grpc_tools.protoc -I. --include_imports --descriptor_set_out=messaging_service.pb \
        apache/rocketmq/v2/service.proto
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqtemplate.extras import install_command

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"RocketMQ's gRPC protocol needs protobuf ({error}); {install_command('grpc')}", name=error.name
    ) from error

if TYPE_CHECKING:
    from google.protobuf.descriptor_pool import DescriptorPool

DecodeError: type[Exception] = message.DecodeError
"""Error of the bytes of a message. Its users name no module of protobuf."""
PACKAGE = "apache.rocketmq.v2"
SERVICE = f"{PACKAGE}.MessagingService"
DESCRIPTOR_SET = Path(__file__).with_name("messaging_service.pb")


def _read_pool() -> DescriptorPool:
    private = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes()).file:
        private.Add(file)
    return private


# It is read during the import. Threads that use the first messages at the same time would read two pools, and a message
# of one does not accept a message of the other.
_POOL = _read_pool()


def pool() -> DescriptorPool:
    """Return the pool with all messages and the service."""
    return _POOL


@cache
def message_class(full_name: str) -> Any:
    """Return the class of a message by its full name.

    Raises:
        KeyError: There is no such message.
    """
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))


def Duration() -> Any:  # noqa: N802 - the name of the message
    """Return an empty ``google.protobuf.Duration`` of the same pool."""
    return message_class("google.protobuf.Duration")()


def Timestamp() -> Any:  # noqa: N802 - the name of the message
    """Return an empty ``google.protobuf.Timestamp`` of the same pool."""
    return message_class("google.protobuf.Timestamp")()


def method_path(method: str) -> str:
    """Return the HTTP/2 path of a method of the service."""
    return f"/{SERVICE}/{method}"


def __getattr__(name: str) -> Any:
    try:
        found = message_class(f"{PACKAGE}.{name}")
    except KeyError:
        raise AttributeError(f"{PACKAGE} has no message {name!r}") from None
    globals()[name] = found  # the next time the module has it
    return found
