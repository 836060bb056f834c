"""What an application sends with, and receives with when it asks."""

from mqtemplate.template.destination import MessageQueueSelector, parse_destination, select_queue_by_hash
from mqtemplate.template.rocketmq_template import RocketMQTemplate
from mqtemplate.template.spring_names import SendCallback

__all__ = ["MessageQueueSelector", "RocketMQTemplate", "SendCallback", "parse_destination", "select_queue_by_hash"]
