"""RocketMQ's remoting protocol as bytes and values, without sockets, threads or clocks.

`codec` has the frames, `headers` and `bodies` the commands' contents, `messages` the messages in bodies. The protocol
is described in ``docs/wire-protocol.md``.
"""

from mqtemplate.remoting.protocol.codec import FrameDecoder, decode_command, encode_command, encode_head
from mqtemplate.remoting.protocol.codes import (
    CURRENT_VERSION,
    MAX_FRAME_BYTES,
    LanguageCode,
    RequestCode,
    ResponseCode,
    SerializeType,
    Version,
)
from mqtemplate.remoting.protocol.command import RemotingCommand

__all__ = [
    "CURRENT_VERSION",
    "MAX_FRAME_BYTES",
    "FrameDecoder",
    "LanguageCode",
    "RemotingCommand",
    "RequestCode",
    "ResponseCode",
    "SerializeType",
    "Version",
    "decode_command",
    "encode_command",
    "encode_head",
]
