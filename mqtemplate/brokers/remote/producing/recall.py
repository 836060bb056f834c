"""Recall of delayed messages.

Source: RocketMQ ``client: DefaultMQProducerImpl.recallMessage``.
"""

from __future__ import annotations

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.errors import response_error
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.pending import ScheduleChange, ScheduleChangeStatus
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader


def cancel(context: ClientContext, handle: str | None, key: str | None) -> ScheduleChange:
    """Cancel delayed messages by handle, the only change of them that RocketMQ supports; see `Broker.cancel`.

    A broker accepts a recall without a check that the message is still pending.

    Raises:
        UnsupportedError: By key, or the broker's ``recallMessageEnable`` is off.
    """
    if (handle is None) == (key is None):
        raise MessageError("name the messages by handle or by key, one of the two; the handle is SendResult.handle")
    if handle is None:
        raise UnsupportedError(
            "a RocketMQ cluster cancels by handle only; keep SendResult.handle, which messages with a timer have"
        )
    results = [_cancel_one(context, each) for each in handle.split(",")]
    count = sum(result is ScheduleChangeStatus.CANCELLED for result in results)
    return ScheduleChange(ScheduleChangeStatus.CANCELLED if count else results[0], count)


def _cancel_one(context: ClientContext, text: str) -> ScheduleChangeStatus:
    handle = decode_handle(text)
    if handle.deliver_ms <= context.clock.now_ms():
        return ScheduleChangeStatus.ALREADY_DELIVERED
    topic = context.namespace.unwrap(handle.topic)
    header = RecallMessageRequestHeader(
        producer_group=context.namespace.wrap(context.settings.producer_group),
        topic=context.namespace.wrap(topic),
        recall_handle=text,
        broker_name=handle.broker_name,
    )
    context.routes.existing(topic)  # its route has the address of the broker
    address = context.routes.address(handle.broker_name)
    request = RemotingCommand.request(RequestCode.RECALL_MESSAGE, header)
    response = context.instance.invoke(address, request, context.settings.request_timeout_ms)
    if response.code == ResponseCode.SUCCESS:
        return ScheduleChangeStatus.CANCELLED
    if response.code == ResponseCode.ILLEGAL_OPERATION and handle.deliver_ms <= context.clock.now_ms():
        return ScheduleChangeStatus.ALREADY_DELIVERED
    problem = response_error(response, f"cancel message {handle.msg_id} of {handle.topic!r}", address)
    if response.code == ResponseCode.NO_PERMISSION and "recall" in (response.remark or "").lower():
        raise UnsupportedError(f"{problem}; set recallMessageEnable=true on the broker")
    if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise UnsupportedError(f"{problem}; brokers can cancel from RocketMQ 5.3 on")
    raise problem
