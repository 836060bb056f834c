"""Sends by ``hash_key`` whose queue disappears: they go on with a queue of the brokers that are left."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from mqtemplate.errors import MQTemplateError, SendError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageQueue
from mqtemplate.results import SendResult
from mqtemplate.template.send_options import SendPlan

Select = Callable[[Message], MessageQueue | None]
"""Selects the queue of a message by its key, among the queues that the topic has now."""


def reselected(plan: SendPlan, select: Select, error: BaseException) -> SendPlan | None:
    """Return the plan with another queue and the rest of the timeout; None if the send failed for another reason."""
    if not (isinstance(error, SendError) and error.queue_is_away) or error.left_ms <= 0:
        return None
    return SendPlan(plan.messages, select(plan.messages[0]), error.left_ms)


def send_again(plan: SendPlan, select: Select, send: Callable[[SendPlan], SendResult], error: SendError) -> SendResult:
    """Send after *error*, as long as queues disappear; raise the error of the last try."""
    while (changed := reselected(plan, select, error)) is not None:
        try:
            return send(changed)
        except SendError as exc:
            plan, error = changed, exc
    raise error


def send_async(
    plan: SendPlan, select: Select, send: Callable[[SendPlan], AwaitableFuture[SendResult]]
) -> AwaitableFuture[SendResult]:
    """Send without waiting, and again as long as queues disappear."""
    result: AwaitableFuture[SendResult] = AwaitableFuture()
    result.set_running_or_notify_cancel()  # a message that is being sent cannot be cancelled

    def finish(plan: SendPlan, sent: Future[SendResult]) -> None:
        error = sent.exception()
        if error is None:
            result.set_result(sent.result())
            return
        try:
            changed = reselected(plan, select, error)
            if changed is None:
                result.set_exception(error)
            else:
                start(changed)
        except MQTemplateError as exc:
            result.set_exception(exc)

    def start(plan: SendPlan) -> None:
        send(plan).add_done_callback(lambda sent: finish(plan, sent))

    start(plan)
    return result
