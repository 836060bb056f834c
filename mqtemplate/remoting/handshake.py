"""Start of a connection to a server with TLS: detection of TLS by the first byte, and the TLS handshake."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from mqtemplate.durations import format_ms
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.loop.io_loop import READ, WRITE, IoLoop
from mqtemplate.remoting.streams import PlainStream, Stream, TlsStream
from mqtemplate.remoting.tls import FIRST_TLS_BYTE, TlsMode

_log = get_logger("mqtemplate.remoting")


class Handshake:
    """Detection of TLS, and the handshake if the client uses it, without blocking the I/O thread.

    Args:
        on_done: Called with the stream when it is ready; the socket is not watched then. None: the connection failed
            and is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        remote: HostAddress,
        loop: IoLoop,
        context: ssl.SSLContext,
        mode: TlsMode,
        on_done: Callable[[Stream | None], None],
        peer_log: LimitedLog,
    ) -> None:
        self._socket = sock
        self._peer_log = peer_log
        self._tls: ssl.SSLSocket | None = None
        self._remote = remote
        self._loop = loop
        self._context = context
        self._mode = mode
        self._on_done = on_done
        self._is_done = False

    def start(self, timeout_ms: int, idle_ms: int) -> None:
        """Watch the socket: *idle_ms* for the first byte, then *timeout_ms* for the handshake."""
        self._timeout_ms = timeout_ms
        self._timer = self._loop.call_later(idle_ms, lambda: self.fail(f"idle for {format_ms(idle_ms)}", is_bad=False))
        self._loop.watch(self._socket, READ, self)

    def on_ready(self, events: int) -> None:
        if self._is_done:
            return
        try:
            if self._tls is None:
                self._detect()
            if self._tls is not None:
                self._handshake(self._tls)
        except ssl.SSLError as exc:
            self.fail(f"TLS handshake: {exc.reason or exc}")
        except OSError as exc:
            self.fail(exc.strerror or str(exc), is_bad=False)

    def abort(self, reason: str) -> None:
        self.fail(f"internal error: {reason}")

    def fail(self, reason: str, *, is_bad: bool = True) -> None:
        """Close the connection; *is_bad*: by a fault of the client, which is logged as a warning."""
        if self._is_done:
            return
        log = self._peer_log.warning if is_bad else _log.debug
        log("remoting.connection_closed", remote=str(self._remote), reason=reason)
        sock = self._tls or self._socket
        self._loop.unwatch(sock)
        sock.close()
        self._finish(None)

    def _detect(self) -> None:
        try:
            first = self._socket.recv(1, socket.MSG_PEEK)  # the byte stays in the socket: it is part of what follows
        except (BlockingIOError, InterruptedError):
            return
        if not first:
            self.fail("closed", is_bad=False)
        elif first[0] == FIRST_TLS_BYTE:
            self._timer.cancel()
            self._timer = self._loop.call_later(
                self._timeout_ms,
                lambda: self.fail(f"the TLS handshake is not complete after {format_ms(self._timeout_ms)}"),
            )
            self._loop.unwatch(self._socket)  # wrap_socket() moves its file descriptor to the new socket
            self._tls = self._context.wrap_socket(
                self._socket, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        elif self._mode is TlsMode.ENFORCING:
            self.fail("the client does not use TLS, which this server enforces")
        else:
            self._loop.unwatch(self._socket)
            self._finish(PlainStream(self._socket))

    def _handshake(self, tls: ssl.SSLSocket) -> None:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.watch(tls, READ, self)
        except ssl.SSLWantWriteError:
            self._loop.watch(tls, WRITE, self)
        else:
            self._loop.unwatch(tls)
            self._finish(TlsStream(tls))

    def _finish(self, stream: Stream | None) -> None:
        self._is_done = True
        self._timer.cancel()
        self._on_done(stream)
