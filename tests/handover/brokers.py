"""Two brokers in memory on one virtual clock, and applications over the old one, and over both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mqtemplate import MQApplication
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.handover import HandOverBroker, HandOverOptions, MoverSettings
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.testing import Harness

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}
STAYS = HandOverOptions()
"""Nothing moves: the old broker releases what is pending there."""
MOVES = HandOverOptions(mover=MoverSettings())


@dataclass
class TwoBrokers:
    """An old broker that an application has used, and the new one.

    Attributes:
        options: Of the hand-over.
    """

    clock: VirtualClock = field(default_factory=VirtualClock)
    options: HandOverOptions = STAYS
    settings: EmbeddedSettings = field(default_factory=EmbeddedSettings)

    def __post_init__(self) -> None:
        self.old = EmbeddedBroker(None, self.settings, self.clock)
        self.new = EmbeddedBroker(None, self.settings, self.clock)
        self.both = HandOverBroker(self.old, self.new, self.options)
        self.old.start()
        self.apps: list[MQApplication] = []

    def with_options(self, **options: Any) -> TwoBrokers:
        """Hand over with other options."""
        self.options = replace(self.options, **options)
        self.both = HandOverBroker(self.old, self.new, self.options)
        return self

    def before(self, *components: object, **settings: object) -> MQApplication:
        """Return the application as it was: with the old broker only."""
        return self._application(self.old, *components, **settings)

    def application(self, *components: object, **settings: object) -> MQApplication:
        """Return the application during the hand-over."""
        return self._application(self.both, *components, **settings)

    def _application(self, broker: Broker, *components: object, **settings: object) -> MQApplication:
        given = {**IN_MEMORY, **settings}
        return MQApplication(
            *components, settings=given, environment={}, clock=self.clock, starters=[], overrides={Broker: broker}
        )

    def send_old(self, topic: str, *bodies: str, queue: int = 0, **properties: str) -> None:
        """Store messages in the old broker, as the application did before the hand-over."""
        for body in bodies:
            message = Message(topic, body.encode(), dict(properties))
            self.old.sends.send(message, self.old.queues(topic)[queue])

    def send_new(self, topic: str, *bodies: str, queue: int = 0) -> None:
        """Send messages during the hand-over."""
        for body in bodies:
            self.both.sends.send(Message(topic, body.encode()), self.both.queues(topic)[queue])

    def delay_old(self, topic: str, body: str, delay_ms: int, key: str = "") -> str:
        """Store a pending message in the old broker; return its handle."""
        properties = {Property.TIMER_DELAY_MS: str(delay_ms)} | ({Property.KEYS: key} if key else {})
        handle = self.old.sends.send(Message(topic, body.encode(), properties)).handle
        assert handle is not None
        return handle

    def harness(self, application: MQApplication | Broker | None = None, **options: Any) -> Harness:
        """Return a harness over an application, or over both brokers."""
        return Harness(application or self.both, **options)

    def fill_new(self, topic: str, count: int) -> None:
        """Store messages of another application in each queue of a topic of the new broker."""
        for number in range(count):
            for queue in self.new.queues(topic):
                self.new.sends.send(Message(topic, f"of others {number}".encode()), queue)

    def reopen_both(self) -> None:
        """Join both brokers again, as a new process does."""
        self.both = HandOverBroker(self.old, self.new, self.options)

    def close(self) -> None:
        """Stop the applications, and close the brokers."""
        for app in self.apps:
            app.stop()
        self.both.close()
        self.new.close()
        self.old.close()


def bodies(messages: list[MessageExt]) -> list[str]:
    """Return the bodies as text."""
    return [message.body.decode() for message in messages]
