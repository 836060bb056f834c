"""Bytes to commands and back, without a socket, a thread or a clock.

Frames are in `codec`, headers in `headers`, JSON bodies in `bodies`, bodies of messages in `messages`.
"""

from mqtemplate.remoting.protocol.codec import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    decode_command,
    encode_command,
    encode_head,
)
from mqtemplate.remoting.protocol.codes import (
    CURRENT_VERSION,
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
