"""Publisher of one listener: it sends the results of the handler to other topics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from mqtemplate.durations import Duration
from mqtemplate.errors import ListenerError
from mqtemplate.listener.calling.send import PublishSpec, ResultSender, Send, is_sends
from mqtemplate.listener.consume_status import ConsumeStatus
from mqtemplate.listener.handler_result import check_result


class Template(Protocol):
    """The sending verbs of a template that a publisher uses."""

    def sync_send(
        self,
        destination: str,
        payload: object,
        timeout: Duration | None = None,
        delay_level: int = 0,
        **options: Any,
    ) -> object:
        """Send, and wait until the broker has stored the message."""

    def async_send(
        self,
        destination: str,
        payload: object,
        timeout: Duration | None = None,
        delay_level: int = 0,
        **options: Any,
    ) -> Awaitable[object]:
        """Send without waiting."""


class Publisher:
    """Sender of the results of one handler.

    Args:
        listener: Name of the listener, for errors.
        specs: Those of ``@publishes``, resolved.
        template: Function that returns the template; None without an application.
    """

    def __init__(
        self,
        listener: str = "",
        specs: Sequence[PublishSpec] = (),
        template: Callable[[], Template] | None = None,
    ) -> None:
        self.specs = specs
        self._listener = listener
        self._template = template

    def publish(self, result: object) -> None:
        """Send what a result requests, and wait until the broker has it."""
        for send in self._sends(result):
            self._found().sync_send(send.destination, send.payload, None, send.delay_level, **send.options)

    async def publish_async(self, result: object) -> None:
        """Do `publish` without blocking the event loop."""
        sent = [
            self._found().async_send(send.destination, send.payload, None, send.delay_level, **send.options)
            for send in self._sends(result)
        ]
        for future in sent:
            await future

    def through(self, sender: ResultSender, result: object) -> Iterator[object]:
        """Send what a result requests by another sender, and yield what it returns."""
        for send in self._sends(result):
            yield sender.send(send.destination, send.payload, send.delay_level, **send.options)

    def around(self, call: Callable[[Any], Any], *, is_async: bool) -> Callable[[Any], Any]:
        """Return a handler, as a function of one argument, that sends its results before it returns."""
        publish, publish_async = self.publish, self.publish_async

        def call_and_send(source: Any) -> object:
            result = call(source)
            if result is not None:
                publish(result)
            return result

        async def await_and_send(source: Any) -> object:
            result = await call(source)
            if result is not None:
                await publish_async(result)
            return result

        return await_and_send if is_async else call_and_send

    def _sends(self, result: object) -> Sequence[Send]:
        if result is None or isinstance(result, ConsumeStatus):
            return ()
        if is_sends(result):
            return [result] if isinstance(result, Send) else result  # type: ignore[return-value]  # of `Send`
        if self.specs:
            check_result(result)
        return [Send(spec.destination, result, spec.delay_level, **spec.options) for spec in self.specs]

    def _found(self) -> Template:
        if self._template is None:
            raise ListenerError(
                f"{self._listener}: its result goes to another topic, and there is no template; give the "
                "ListenerRegistry template=..., or let an MQApplication run the listener"
            )
        return self._template()
