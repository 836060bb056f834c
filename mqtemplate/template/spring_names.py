"""The names of rocketmq-spring's ``RocketMQTemplate``, each one line over ours.

Every ``delayLevel``, ``timeout`` and so on is optional and stands where its Java overload has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any, Protocol, get_type_hints

from mqtemplate.message import Message, MessageExt
from mqtemplate.results import SendResult, TransactionSendResult
from mqtemplate.template.destination import MessageQueueSelector


class SendCallback(Protocol):
    """Who wants to hear how an asynchronous send went."""

    def onSuccess(self, result: SendResult) -> object: ...

    def onException(self, error: BaseException) -> object: ...


class LocalRequestCallback(Protocol):
    """Who wants to hear the reply to a request. The type that ``onSuccess`` names is what the reply becomes."""

    def onSuccess(self, message: Any) -> object: ...

    def onException(self, error: BaseException) -> object: ...


class _Verbs(Protocol):
    """What the names below stand for: the verbs of `mqtemplate.template.RocketMQTemplate`."""

    message_queue_selector: MessageQueueSelector

    def sync_send(
        self,
        destination: str,
        payload: object,
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
    ) -> SendResult: ...

    def async_send(
        self,
        destination: str,
        payload: object,
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
        on_success: Callable[[SendResult], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> Future[SendResult]: ...

    def send_one_way(self, destination: str, payload: object, *, hash_key: str | None = None) -> None: ...

    def send_in_transaction(self, destination: str, payload: object, arg: object = None) -> TransactionSendResult: ...

    def send_and_receive(
        self,
        destination: str,
        payload: object,
        reply_type: type[Any],
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        hash_key: str | None = None,
    ) -> Any: ...

    def async_send_and_receive(
        self,
        destination: str,
        payload: object,
        reply_type: type[Any],
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        hash_key: str | None = None,
        on_success: Callable[[Any], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> Future[Any]: ...

    def convert_and_send(
        self,
        destination: str,
        payload: object,
        headers: Mapping[str, object] | None = None,
        post_processor: Callable[[Message], Message] | None = None,
    ) -> SendResult: ...


class SpringNames:
    """Mixed into the template, so that code and habits from Spring go on working."""

    def syncSend(
        self: _Verbs, destination: str, payload: object, timeout: int | None = None, delayLevel: int = 0
    ) -> SendResult:
        return self.sync_send(destination, payload, timeout, delayLevel)

    def syncSendOrderly(
        self: _Verbs, destination: str, payload: object, hashKey: str, timeout: int | None = None, delayLevel: int = 0
    ) -> SendResult:
        return self.sync_send(destination, payload, timeout, delayLevel, hash_key=hashKey)

    def syncSendDelayTimeSeconds(self: _Verbs, destination: str, payload: object, delayTime: int) -> SendResult:
        return self.sync_send(destination, payload, delay=timedelta(seconds=delayTime))

    def syncSendDelayTimeMills(self: _Verbs, destination: str, payload: object, delayTime: int) -> SendResult:
        return self.sync_send(destination, payload, delay=timedelta(milliseconds=delayTime))

    def syncSendDeliverTimeMills(self: _Verbs, destination: str, payload: object, deliverTimeMills: int) -> SendResult:
        return self.sync_send(destination, payload, deliver_at=deliverTimeMills)

    def asyncSend(
        self: _Verbs,
        destination: str,
        payload: object,
        sendCallback: SendCallback | None = None,
        timeout: int | None = None,
        delayLevel: int = 0,
    ) -> Future[SendResult]:
        return self.async_send(destination, payload, timeout, delayLevel, **_callbacks(sendCallback))

    def asyncSendOrderly(
        self: _Verbs,
        destination: str,
        payload: object,
        hashKey: str,
        sendCallback: SendCallback | None = None,
        timeout: int | None = None,
        delayLevel: int = 0,
    ) -> Future[SendResult]:
        return self.async_send(destination, payload, timeout, delayLevel, hash_key=hashKey, **_callbacks(sendCallback))

    def sendOneWay(self: _Verbs, destination: str, payload: object) -> None:
        self.send_one_way(destination, payload)

    def sendOneWayOrderly(self: _Verbs, destination: str, payload: object, hashKey: str) -> None:
        self.send_one_way(destination, payload, hash_key=hashKey)

    def convertAndSend(
        self: _Verbs,
        destination: str,
        payload: object,
        headers: Mapping[str, object] | None = None,
        postProcessor: Callable[[Message], Message] | None = None,
    ) -> SendResult:
        return self.convert_and_send(destination, payload, headers, postProcessor)

    def sendMessageInTransaction(
        self: _Verbs, destination: str, payload: object, arg: object = None
    ) -> TransactionSendResult:
        return self.send_in_transaction(destination, payload, arg)

    def sendAndReceive(
        self: _Verbs,
        destination: str,
        payload: object,
        type: type[Any] | LocalRequestCallback,  # noqa: A002 (Java's name; nothing here needs the builtin)
        hashKey: str | int | None = None,
        timeout: int | None = None,
        delayLevel: int = 0,
    ) -> Any:
        """The reply as *type*; given a callback instead, the future of it. In Java *hashKey* may be left out, too."""
        hash_key, limit, level = (
            (None, hashKey, delayLevel if timeout is None else timeout)
            if isinstance(hashKey, int)
            else (hashKey, timeout, delayLevel)
        )
        if inspect.isclass(type):
            return self.send_and_receive(destination, payload, type, limit, level, hash_key=hash_key)
        return self.async_send_and_receive(
            destination,
            payload,
            _reply_type(type),
            limit,
            level,
            hash_key=hash_key,
            on_success=type.onSuccess,
            on_error=type.onException,
        )

    def getMessageQueueSelector(self: _Verbs) -> MessageQueueSelector:
        return self.message_queue_selector

    def setMessageQueueSelector(self: _Verbs, messageQueueSelector: MessageQueueSelector) -> None:
        self.message_queue_selector = messageQueueSelector

    # --- the names of the v5 client's template -------------------------------------------------------

    def syncSendNormalMessage(self: _Verbs, destination: str, payload: object) -> SendResult:
        return self.sync_send(destination, payload)

    def syncSendFifoMessage(self: _Verbs, destination: str, payload: object, messageGroup: str) -> SendResult:
        return self.sync_send(destination, payload, hash_key=messageGroup)

    def syncSendDelayMessage(
        self: _Verbs, destination: str, payload: object, messageDelayTime: timedelta | float
    ) -> SendResult:
        return self.sync_send(destination, payload, delay=messageDelayTime)


def _callbacks(sendCallback: SendCallback | None) -> dict[str, Any]:
    return {} if sendCallback is None else {"on_success": sendCallback.onSuccess, "on_error": sendCallback.onException}


def _reply_type(callback: Any) -> Any:
    """What ``onSuccess`` says its parameter is; the whole message if it says nothing."""
    parameters = list(inspect.signature(callback.onSuccess).parameters)
    return get_type_hints(callback.onSuccess).get(parameters[0], MessageExt) if parameters else MessageExt
