"""Limits of a gRPC server: what its clients may make it hold and do."""

from __future__ import annotations

from dataclasses import dataclass, field

from mqtemplate.remoting.settings import RemotingServerSettings

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """Limits of one connection. Sizes are in bytes.

    A control frame is one that carries no call: PING, SETTINGS, PRIORITY, WINDOW_UPDATE, an empty one, a frame of a
    closed stream or of an unknown type. Each call and each larger DATA frame permits some more of them.

    Attributes:
        max_streams: Largest number of open streams. A further one is refused.
        stream_window_bytes: Receive window of a stream. It is refilled when half of it is used.
        connection_window_bytes: Receive window of all streams together.
        max_header_bytes: Largest size of a list of fields, and of its encoded block.
        max_control_frames: With more control frames than this at once, the connection is closed.
        control_frames_per_s: Number of them that is permitted all the time.
        max_resets: With more streams than this that end by RST_STREAM at once, the connection is closed.
        resets_per_s: Number of them that is permitted all the time.
    """

    max_streams: int = 1_000
    stream_window_bytes: int = _MIB
    connection_window_bytes: int = 4 * _MIB
    max_header_bytes: int = 16_384
    max_control_frames: int = 10_000
    control_frames_per_s: int = 1_000
    max_resets: int = 1_000
    resets_per_s: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcLimits(RemotingServerSettings):
    """Limits and settings of a `GrpcServer`; those of all servers over TCP are inherited.

    A connection without a call for ``limits.idle_ms`` is closed. One with calls gets a PING after half of that time
    without a byte of the client, and is closed after the whole of it.

    Attributes:
        http2: Limits of one connection.
        max_message_bytes: Size of the largest message of a client. RocketMQ: 130 MiB.
        stall_ms: A call whose client does not permit to send the next part of its response for this time is cancelled.
    """

    http2: Http2Limits = field(default_factory=Http2Limits)
    max_message_bytes: int = 130 * _MIB
    max_partial_bytes: int = 160 * _MIB
    stall_ms: int = 60_000
