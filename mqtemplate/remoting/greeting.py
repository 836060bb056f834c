"""The beginning of a connection to a server with TLS: which of both it speaks, and the handshake."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

import structlog

from mqtemplate.message import HostAddress
from mqtemplate.remoting.io_loop import READ, WRITE, IoLoop
from mqtemplate.remoting.streams import PlainStream, Stream, TlsStream
from mqtemplate.remoting.tls import FIRST_TLS_BYTE, TlsMode

_log = structlog.stdlib.get_logger("mqtemplate.remoting")


class Greeting:
    """Looks at the first byte, which stays in place, and does the handshake where it is TLS's.

    Args:
        on_done: Takes the stream, and whether it is under TLS; the socket is not watched at that moment. None: it came
            to nothing, and is closed.
        timeout_ms: For all of it.
    """

    def __init__(
        self,
        sock: socket.socket,
        remote: HostAddress,
        loop: IoLoop,
        context: ssl.SSLContext,
        mode: TlsMode,
        on_done: Callable[[Stream | None, bool], None],
    ) -> None:
        self._socket = sock
        self._tls: ssl.SSLSocket | None = None
        self._remote = remote
        self._loop = loop
        self._context = context
        self._mode = mode
        self._on_done = on_done
        self._is_done = False

    def begin(self, timeout_ms: int, silence_ms: int) -> None:
        """Watch the socket: *silence_ms* for the first byte, then *timeout_ms* for the handshake."""
        self._timeout_ms = timeout_ms
        self._timer = self._loop.call_later(silence_ms, lambda: self.fail(f"idle for {silence_ms} ms", is_bad=False))
        self._loop.watch(self._socket, READ, self)

    def on_ready(self, events: int) -> None:
        if self._is_done:
            return
        try:
            if self._tls is None:
                self._look()
            if self._tls is not None:
                self._shake_hands(self._tls)
        except ssl.SSLError as exc:
            self.fail(f"TLS handshake: {exc.reason or exc}")
        except OSError as exc:
            self.fail(exc.strerror or str(exc), is_bad=False)

    def abort(self, reason: str) -> None:
        self.fail(f"internal error: {reason}")

    def fail(self, reason: str, *, is_bad: bool = True) -> None:
        """Close it."""
        if self._is_done:
            return
        log = _log.warning if is_bad else _log.debug
        log("remoting.connection_closed", remote=str(self._remote), reason=reason)
        sock = self._tls or self._socket
        self._loop.forget(sock)
        sock.close()
        self._finish(None)

    def _look(self) -> None:
        try:
            first = self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        if not first:
            self.fail("closed", is_bad=False)
        elif first[0] == FIRST_TLS_BYTE:
            self._timer.cancel()
            self._timer = self._loop.call_later(
                self._timeout_ms, lambda: self.fail(f"the TLS handshake is not complete after {self._timeout_ms} ms")
            )
            self._loop.forget(self._socket)  # wrapping moves its file descriptor
            self._tls = self._context.wrap_socket(
                self._socket, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        elif self._mode is TlsMode.ENFORCING:
            self.fail("it does not speak TLS, which this server enforces")
        else:
            self._loop.forget(self._socket)
            self._finish(PlainStream(self._socket))

    def _shake_hands(self, tls: ssl.SSLSocket) -> None:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.watch(tls, READ, self)
        except ssl.SSLWantWriteError:
            self._loop.watch(tls, WRITE, self)
        else:
            self._loop.forget(tls)
            self._finish(TlsStream(tls))

    def _finish(self, stream: Stream | None) -> None:
        self._is_done = True
        self._timer.cancel()
        self._on_done(stream, self._tls is not None)
