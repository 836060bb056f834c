"""The method names of rocketmq-spring's ``RocketMQTemplate``, each in terms of our verbs.

Optional Java parameters such as ``timeout`` and ``delayLevel`` have the position of the Java overload.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from datetime import timedelta
from typing import Any, Protocol, TypeVar, get_type_hints, overload

from mqtemplate.durations import Duration
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt
from mqtemplate.results import SendResult, TransactionSendResult
from mqtemplate.template.options import MessageQueueSelector

_Reply = TypeVar("_Reply")


class SendCallback(Protocol):
    """Callback of an asynchronous send, with Spring's method names."""

    def onSuccess(self, result: SendResult) -> object:
        """Handle the result of the send."""

    def onException(self, error: BaseException) -> object:
        """Handle the error of a failed send."""


class LocalRequestCallback(Protocol):
    """Callback of a request, with Spring's method names. The annotation of ``message`` is the type of the reply."""

    def onSuccess(self, message: Any) -> object:
        """Handle the reply."""

    def onException(self, error: BaseException) -> object:
        """Handle the error of a failed request."""


class _Verbs(Protocol):
    """The verbs of `mqtemplate.template.RocketMQTemplate` that the names below call; ``Any`` are their options."""

    message_queue_selector: MessageQueueSelector
    default_destination: str | None
    callback_executor: Executor | None

    # A property, as in the class: type checkers do not take one for an attribute that can be set.
    @property
    def charset(self) -> str: ...
    @charset.setter
    def charset(self, charset: str) -> None: ...

    def sync_send(self, *args: Any, **options: Any) -> SendResult: ...
    def async_send(self, *args: Any, **options: Any) -> AwaitableFuture[SendResult]: ...
    def send_one_way(self, *args: Any, **options: Any) -> None: ...
    def convert_and_send(self, *args: Any, **options: Any) -> SendResult: ...
    def send_in_transaction(self, *args: Any, **options: Any) -> TransactionSendResult: ...
    def send_and_receive(self, *args: Any, **options: Any) -> Any: ...
    def async_send_and_receive(self, *args: Any, **options: Any) -> Any: ...


class SpringNames:
    """Mixin of `mqtemplate.template.RocketMQTemplate` with the method names of rocketmq-spring."""

    def syncSend(
        self: _Verbs, destination: str, payload: object, timeout: Duration | None = None, delayLevel: int = 0
    ) -> SendResult:
        """Call ``sync_send``; a list is a batch."""
        return self.sync_send(destination, payload, timeout, delayLevel)

    def syncSendOrderly(
        self: _Verbs,
        destination: str,
        payload: object,
        hashKey: str,
        timeout: Duration | None = None,
        delayLevel: int = 0,
    ) -> SendResult:
        """Call ``sync_send`` with *hash_key*."""
        return self.sync_send(destination, payload, timeout, delayLevel, hash_key=hashKey)

    def syncSendDelayTimeSeconds(self: _Verbs, destination: str, payload: object, delayTime: int) -> SendResult:
        """Call ``sync_send`` with a *delay* in seconds."""
        return self.sync_send(destination, payload, delay=timedelta(seconds=delayTime))

    def syncSendDelayTimeMills(self: _Verbs, destination: str, payload: object, delayTime: int) -> SendResult:
        """Call ``sync_send`` with a *delay* in milliseconds."""
        return self.sync_send(destination, payload, delay=timedelta(milliseconds=delayTime))

    def syncSendDeliverTimeMills(self: _Verbs, destination: str, payload: object, deliverTimeMills: int) -> SendResult:
        """Call ``sync_send`` with *deliver_at* in epoch milliseconds."""
        return self.sync_send(destination, payload, deliver_at=deliverTimeMills)

    def asyncSend(
        self: _Verbs,
        destination: str,
        payload: object,
        sendCallback: SendCallback | None = None,
        timeout: Duration | None = None,
        delayLevel: int = 0,
    ) -> AwaitableFuture[SendResult]:
        """Call ``async_send`` with the methods of the callback."""
        return self.async_send(destination, payload, timeout, delayLevel, **_callbacks(sendCallback))

    def asyncSendOrderly(
        self: _Verbs,
        destination: str,
        payload: object,
        hashKey: str,
        sendCallback: SendCallback | None = None,
        timeout: Duration | None = None,
        delayLevel: int = 0,
    ) -> AwaitableFuture[SendResult]:
        """Call ``async_send`` with *hash_key* and the methods of the callback."""
        return self.async_send(destination, payload, timeout, delayLevel, hash_key=hashKey, **_callbacks(sendCallback))

    def sendOneWay(self: _Verbs, destination: str, payload: object) -> None:
        """Call ``send_one_way``."""
        self.send_one_way(destination, payload)

    def sendOneWayOrderly(self: _Verbs, destination: str, payload: object, hashKey: str) -> None:
        """Call ``send_one_way`` with *hash_key*."""
        self.send_one_way(destination, payload, hash_key=hashKey)

    def convertAndSend(
        self: _Verbs,
        destination: str,
        payload: object,
        headers: Mapping[str, object] | None = None,
        postProcessor: Callable[[Message], Message] | None = None,
    ) -> SendResult:
        """Call ``convert_and_send``."""
        return self.convert_and_send(destination, payload, headers, postProcessor)

    def sendMessageInTransaction(
        self: _Verbs, destination: str, payload: object, arg: object = None
    ) -> TransactionSendResult:
        """Call ``send_in_transaction``."""
        return self.send_in_transaction(destination, payload, arg)

    @overload
    def sendAndReceive(
        self: _Verbs,
        destination: str,
        payload: object,
        type: type[_Reply],
        hashKey: str | int | None = None,
        timeout: Duration | None = None,
        delayLevel: int = 0,
    ) -> _Reply: ...

    @overload
    def sendAndReceive(
        self: _Verbs,
        destination: str,
        payload: object,
        type: LocalRequestCallback,
        hashKey: str | int | None = None,
        timeout: Duration | None = None,
        delayLevel: int = 0,
    ) -> AwaitableFuture[Any]: ...

    def sendAndReceive(
        self: _Verbs,
        destination: str,
        payload: object,
        type: type[Any] | LocalRequestCallback,  # noqa: A002 (Java's name; nothing here needs the builtin)
        hashKey: str | int | None = None,
        timeout: Duration | None = None,
        delayLevel: int = 0,
    ) -> Any:
        """Return the reply as *type*, or its future if *type* is a callback. *hashKey* may be left out, as in Java."""
        key, limit, level = (hashKey, timeout, delayLevel)  # type: tuple[str | int | None, Duration | None, Any]
        if isinstance(key, int):  # no hash key: the other arguments are one position to the left
            key, limit, level = (None, key, delayLevel if timeout is None else timeout)
        if inspect.isclass(type):
            return self.send_and_receive(destination, payload, type, limit, level, hash_key=key)
        reply_type, callbacks = _reply_type(type), _callbacks(type)
        return self.async_send_and_receive(destination, payload, reply_type, limit, level, hash_key=key, **callbacks)

    def getMessageQueueSelector(self: _Verbs) -> MessageQueueSelector:
        """Return ``message_queue_selector``."""
        return self.message_queue_selector

    def setMessageQueueSelector(self: _Verbs, messageQueueSelector: MessageQueueSelector) -> None:
        """Set ``message_queue_selector``."""
        self.message_queue_selector = messageQueueSelector

    def send(self: _Verbs, destination: str, message: object) -> SendResult:
        """Call ``sync_send``; the name comes from Spring's base class."""
        return self.sync_send(destination, message)

    def getDefaultDestination(self: _Verbs) -> str | None:
        """Return ``default_destination``."""
        return self.default_destination

    def setDefaultDestination(self: _Verbs, defaultDestination: str | None) -> None:
        """Set ``default_destination``."""
        self.default_destination = defaultDestination

    def setAsyncSenderExecutor(self: _Verbs, asyncSenderExecutor: Executor | None) -> None:
        """Set ``callback_executor``, which runs the callbacks of asynchronous sends."""
        self.callback_executor = asyncSenderExecutor

    def getCharset(self: _Verbs) -> str:
        """Return ``charset``."""
        return self.charset

    def setCharset(self: _Verbs, charset: str) -> None:
        """Set ``charset``, the encoding of text that the template sends."""
        self.charset = charset

    # --- the names of the v5 client's template -------------------------------------------------------

    def syncSendNormalMessage(self: _Verbs, destination: str, payload: object) -> SendResult:
        """Call ``sync_send``."""
        return self.sync_send(destination, payload)

    def syncSendFifoMessage(self: _Verbs, destination: str, payload: object, messageGroup: str) -> SendResult:
        """Call ``sync_send`` with the message group as *hash_key*."""
        return self.sync_send(destination, payload, hash_key=messageGroup)

    def syncSendDelayMessage(self: _Verbs, destination: str, payload: object, messageDelayTime: Duration) -> SendResult:
        """Call ``sync_send`` with *delay*."""
        return self.sync_send(destination, payload, delay=messageDelayTime)

    def syncSendGrpcMessage(
        self: _Verbs,
        destination: str,
        message: object,
        messageDelayTime: Duration | None = None,
        messageGroup: str | None = None,
    ) -> SendResult:
        """Call ``sync_send`` with *delay* and *hash_key*."""
        return self.sync_send(destination, message, delay=messageDelayTime, hash_key=messageGroup)

    def asyncSendNormalMessage(
        self: _Verbs, destination: str, payload: object, future: Future[SendResult] | None = None
    ) -> AwaitableFuture[SendResult]:
        """Call ``async_send``; *future* gets the result too."""
        return _also(self.async_send(destination, payload), future)

    def asyncSendFifoMessage(
        self: _Verbs, destination: str, payload: object, messageGroup: str, future: Future[SendResult] | None = None
    ) -> AwaitableFuture[SendResult]:
        """Call ``async_send`` with the message group as *hash_key*; *future* gets the result too."""
        return _also(self.async_send(destination, payload, hash_key=messageGroup), future)

    def asyncSendDelayMessage(
        self: _Verbs,
        destination: str,
        payload: object,
        messageDelayTime: Duration,
        future: Future[SendResult] | None = None,
    ) -> AwaitableFuture[SendResult]:
        """Call ``async_send`` with *delay*; *future* gets the result too."""
        return _also(self.async_send(destination, payload, delay=messageDelayTime), future)

    def asyncSendWithObjectPayload(
        self: _Verbs,
        destination: str,
        payload: object,
        messageDelayTime: Duration | None = None,
        messageGroup: str | None = None,
        future: Future[SendResult] | None = None,
    ) -> AwaitableFuture[SendResult]:
        """Call ``async_send`` with *delay* and *hash_key*; *future* gets the result too."""
        return _also(self.async_send(destination, payload, delay=messageDelayTime, hash_key=messageGroup), future)

    asyncSendWithStringPayload = asyncSendWithObjectPayload
    asyncSendWithBytePayload = asyncSendWithObjectPayload
    asyncSendWithMessagePayload = asyncSendWithObjectPayload


def _also(sent: AwaitableFuture[SendResult], future: Future[SendResult] | None) -> AwaitableFuture[SendResult]:
    """Return *sent*, whose result *future* gets too."""

    def pass_on(done: Future[SendResult]) -> None:
        assert future is not None
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)

    if future is not None:
        sent.add_done_callback(pass_on)
    return sent


def _callbacks(callback: Any) -> dict[str, Any]:
    return {} if callback is None else {"on_success": callback.onSuccess, "on_error": callback.onException}


def _reply_type(callback: Any) -> Any:
    """Return the annotation of the parameter of ``onSuccess``; `MessageExt` without an annotation."""
    parameters = list(inspect.signature(callback.onSuccess).parameters)
    return get_type_hints(callback.onSuccess).get(parameters[0], MessageExt) if parameters else MessageExt
