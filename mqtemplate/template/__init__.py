"""The public API for sending messages, and for receiving them on request."""

from mqtemplate.template.options import (
    MessageQueueSelector,
    Send,
    SendOptions,
    parse_destination,
    select_queue_by_hash,
    shows_send_options,
)
from mqtemplate.template.receiving import Subscription
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.template.spring_names import LocalRequestCallback, SendCallback
from mqtemplate.template.transactions import (
    TRANSACTION_LISTENER_ATTRIBUTE,
    TransactionListenerSpec,
    transaction_listener,
    transaction_listener_spec,
)

__all__ = [
    "TRANSACTION_LISTENER_ATTRIBUTE",
    "LocalRequestCallback",
    "MessageQueueSelector",
    "RocketMQTemplate",
    "Send",
    "SendCallback",
    "SendOptions",
    "Subscription",
    "TransactionListenerSpec",
    "parse_destination",
    "select_queue_by_hash",
    "shows_send_options",
    "transaction_listener",
    "transaction_listener_spec",
]
