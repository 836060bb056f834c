"""A bridge in five lines: each message of ``orders`` at headquarters goes on to ``orders`` of the shop.

Tag, keys and properties go with it. If the shop cannot be reached, the message is retried: a bridge loses nothing, and
may repeat a message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mqtemplate import MessageExt, MQApplication, Named, RocketMQTemplate, message_listener

HERE = Path(__file__).parent


@message_listener("orders", "bridge-to-shop", broker="headquarters")
class Bridge:
    def __init__(self, shop: Annotated[RocketMQTemplate, Named("shop")]) -> None:
        self.shop = shop

    def on_message(self, message: MessageExt) -> None:
        named = {name: text for name, text in (("TAGS", message.tags), ("KEYS", message.keys)) if text}
        self.shop.sync_send(message.topic, message.body, headers={**message.user_properties, **named})


def main() -> None:
    """Work until Ctrl-C."""
    MQApplication(Bridge, config_folder=HERE).run()
