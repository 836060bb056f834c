"""A client beside an attack: it sends requests at a steady pace, and reports the time of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand

OnResponse = Callable[[float, RemotingCommand | BrokerError], None]
"""Receives the time of a request in microseconds, and the response or the error."""


@contextmanager
def other_client(
    address: HostAddress, request: Callable[[], RemotingCommand], period_s: float, on_response: OnResponse
) -> Iterator[None]:
    """Send a request every *period_s* over a connection of its own, as long as the context is open."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    stopped = threading.Event()

    def send() -> None:
        while not stopped.wait(period_s):
            start = time.perf_counter()
            response: RemotingCommand | BrokerError
            try:
                response = client.invoke(str(address), request(), 10_000)
            except BrokerError as exc:
                response = exc
            on_response((time.perf_counter() - start) * 1e6, response)

    thread = threading.Thread(target=send, name="other client")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        client.close()
