"""Run of one connection: its sends, and its pulls."""

from __future__ import annotations

from mqtemplate.remoting.connection import RequestRun
from mqtemplate.remoting.protocol.codec import Frame

_STARTS_OF_PULLS = (b'{"code":11,', b'{"code":361,')
"""Clients write the code first. Pulls of one that does not are processed as commands."""


class ConnectionRun:
    """Requests that are processed without decoding each. Messages are stored before a pull after them reads."""

    def __init__(self, sends: RequestRun, pulls: RequestRun) -> None:
        self._sends = sends
        self._pulls = pulls

    def take(self, frame: Frame) -> bool:
        if not frame[1].startswith(_STARTS_OF_PULLS):
            return self._sends.take(frame)
        self._sends.process()
        return self._pulls.take(frame)

    def process(self) -> None:
        self._sends.process()
        self._pulls.process()
