"""RocketMQ's delayed messages for Python: a template, decorated listeners, an embedded durable broker, Spark.

What is here is the public face. Beside it stand, for those who need more: `mqtemplate.context` (starters of your own),
`mqtemplate.spark` (sessions, the data source) and `mqtemplate.testing` (virtual time, recorded messages).
"""

from mqtemplate import errors
from mqtemplate.broker import Broker, ConsumeFromWhere, MessageModel
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.clock import Clock, SystemClock, VirtualClock
from mqtemplate.context import AppSettings, MQApplication, Section, Value, load_settings, service
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.errors import MQTemplateError
from mqtemplate.listener import BatchFailure, ConsumeMode, ConsumeStatus, current_message, message_listener
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.pending import PendingCounts, PendingMessage, PendingPage, ScheduleChange, ScheduleChangeStatus
from mqtemplate.results import SendResult, SendStatus, TransactionSendResult, TransactionState
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.spark import SparkBatch, spark_listener
from mqtemplate.store import FlushDiskType
from mqtemplate.template import RocketMQTemplate, transaction_listener

__all__ = [
    # the application
    "MQApplication",
    "service",
    "Value",
    "Section",
    "AppSettings",
    "load_settings",
    # sending
    "RocketMQTemplate",
    "Message",
    "SendResult",
    "SendStatus",
    "MessageConverter",
    "JsonMessageConverter",
    # in transactions
    "transaction_listener",
    "TransactionState",
    "TransactionSendResult",
    # what waits
    "ScheduleChange",
    "ScheduleChangeStatus",
    "PendingPage",
    "PendingMessage",
    "PendingCounts",
    # receiving
    "message_listener",
    "MessageExt",
    "MessageQueue",
    "ConsumeMode",
    "ConsumeStatus",
    "BatchFailure",
    "current_message",
    "ConsumeFromWhere",
    "MessageModel",
    "SelectorType",
    # in batches, with Spark
    "spark_listener",
    "SparkBatch",
    # the broker under it
    "Broker",
    "EmbeddedBroker",
    "EmbeddedSettings",
    "RemoteBroker",
    "RemoteSettings",
    "FlushDiskType",
    # time
    "Clock",
    "SystemClock",
    "VirtualClock",
    # what can go wrong
    "MQTemplateError",
    "errors",
]
