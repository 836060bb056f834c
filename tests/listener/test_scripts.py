"""Golden scripts: what a listener handles on a virtual clock, and what it commits, retries and logs."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep as virtual_sleep
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_validator
from structlog.testing import capture_logs

from mqtemplate import (
    Backoff,
    CircuitBreaker,
    DeadLetter,
    Deduplication,
    PauseListener,
    RateLimit,
    RetryLater,
    TimeLimit,
    Timing,
    VirtualClock,
)
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerError, ConfigurationError, ListenerError, SendError, UnsupportedError
from mqtemplate.listener import BatchFailure, ConsumeStatus, ListenerContainer, current_messages, message_listener
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.record import dead_letter
from tests.golden import check_script, scripts_in
from tests.listener.conftest import App

MODES = ("CONCURRENTLY", "ORDERLY")
SCRIPTS = [
    (path, mode) for path in scripts_in(Path(__file__).parent / "scripts") for mode in MODES
    if path.stem.rpartition("_")[2] in (mode.lower(), "both")
]  # fmt: skip
QUIET = ("listener.started", "listener.stopped")


class Order(BaseModel):
    """Order whose amount must be positive."""

    amount: int

    @field_validator("amount")
    @classmethod
    def _positive(cls, amount: int) -> int:
        if amount <= 0:
            raise ValueError("must be positive")
        return amount


NAMES = {
    each.__name__: each
    for each in (
        *(Backoff, BatchFailure, BrokerError, DeadLetter, Order, PauseListener, RetryLater, SendError),
        *(CircuitBreaker, Deduplication, RateLimit, TimeLimit, Timing, datetime, timedelta),
    )
} | {"UTC": UTC, "LATER": ConsumeStatus.RECONSUME_LATER, "DONE": ConsumeStatus.CONSUME_SUCCESS}


class Commands:
    """``listen`` starts a broker with one listener; most other commands print the calls of handlers since.

    A line of a call: time since the start, bodies, number of the attempt if it is not the first one, outcome.

    Args:
        mode: Consume mode of the listeners.
    """

    def __init__(self, mode: str, logs: list[Any], undo: contextlib.ExitStack) -> None:
        self._mode = mode
        self._logs = logs
        self._undo = undo
        self._settings = EmbeddedSettings()
        self._calls: list[str] = []
        self._names: dict[str, Any] = {**NAMES, "fail": _fail, "note": self._note_text}

    def _value(self, text: str, **names: object) -> Any:
        return eval(text, self._names | names)

    def let(self, **values: str) -> None:
        """Give values a name in the expressions that follow."""
        self._names |= {name: self._value(text) for name, text in values.items()}

    def show(self, text: str) -> list[str]:
        """Print a value, or the error of its expression."""
        try:
            return [f"{self._value(text)}"]
        except (ConfigurationError, ListenerError, ValueError) as error:
            return [f"{type(error).__name__}: {error}"]

    def broker(self, **settings: str) -> None:
        """Set the settings of the next broker."""
        self._settings = EmbeddedSettings(**{name: eval(text) for name, text in settings.items()})

    def listen(self, *kinds: str, **options: str) -> None:
        """Start a broker and a listener; see `also`."""
        self._undo.close()
        self._logs.clear()
        broker = self._undo.enter_context(EmbeddedBroker(None, self._settings, VirtualClock()))
        self._app = App(broker)
        self._undo.callback(self._app.registry.stop)
        self._settings = EmbeddedSettings()
        self._start_ms = broker.clock.now_ms()
        self._tries: Counter[str] = Counter()
        self.also(*kinds, **options)

    def also(
        self,
        *kinds: str,
        id: str = "bill",  # noqa: A002
        topic: str = "'orders'",
        group: str = "billing",
        payload: str = "str",
        does: str = "None",
        sleep: str = "",
        **attributes: str,
    ) -> None:
        """Start a listener beside the others.

        Args:
            kinds: ``async``, ``batch`` or both.
            sleep: Seconds that an async handler sleeps before.
            does: Expression for each call: an exception is raised, another value returned. It may use *body*, *bodies*,
                *attempt*, *tries* (calls of this listener so far), *queue*, *committed*, *seek* and *container*.
        """

        def handle(value: object) -> object:
            messages = current_messages()
            bodies = [message.body.decode() for message in messages]
            self._tries[id] += 1
            values = {
                "body": bodies[0],
                "bodies": bodies,
                "attempt": messages[0].reconsume_times + 1,
                "tries": self._tries[id],
                "queue": messages[0].queue_id,
                "container": self._app.registry.container(id),
                "committed": self._app.committed(group),
                "seek": self.seek,
            }
            result = self._value(does, **values)
            self._note(id, messages, value if isinstance(value, list) else [value], result)
            if isinstance(result, BaseException):
                raise result
            return result

        async def handle_async(value: object) -> object:
            await (virtual_sleep(float(sleep)) if sleep else asyncio.to_thread(lambda: None))
            return handle(value)

        handler: Any = handle_async if "async" in kinds else handle
        kind = self._value(payload)
        handler.__annotations__ = {"value": list[kind] if "batch" in kinds else kind}
        values = {name: self._value(text, start_ms=self._start_ms) for name, text in attributes.items()}
        given = {"consume_mode": self._mode} | values
        self._container: ListenerContainer = self._app.listen(
            message_listener(eval(topic), group, id=id, **given)(handler)
        )

    def _note(self, listener: str, messages: Any, payloads: list[Any], result: object) -> None:
        words = [format_ms(self._app.broker.clock.now_ms() - self._start_ms)]
        words += [] if listener == "bill" else [listener]
        words += sorted({message.topic for message in messages} - {"orders"})
        words.append(", ".join(map(str, payloads)))
        attempt = messages[0].reconsume_times + 1
        words += [f"attempt {attempt}"] if attempt > 1 else []
        outcome = type(result).__name__ if isinstance(result, BaseException) else getattr(result, "name", result)
        self._calls.append(" ".join(words) + ("" if outcome is None else f": {outcome}"))

    def _note_text(self, text: object, result: object = None) -> object:
        """Print a text, and return *result*. Expressions call it as ``note``."""
        self._calls.append(f"{text}")
        return result

    def _printed(self) -> list[str]:
        printed, self._calls = self._calls, []
        return printed

    # --- messages and time -------------------------------------------------------------------------

    def send(self, *bodies: str, topic: str = "orders", tag: str = "", queue: str = "0", keys: str = "") -> None:
        """Send messages to one queue."""
        self._app.send(topic, *bodies, tag=tag or None, queue_id=int(queue), keys=keys or None)

    def sized(self, body: str, characters: str) -> None:
        """Send a message with a property of this size."""
        queue = MessageQueue("orders", self._app.broker.name, 0)
        self._app.broker.sends.send(Message("orders", body.encode(), {"data": "x" * int(characters)}), queue)

    def delayed(self, body: str, level: str) -> None:
        self._app.broker.sends.send(Message("orders", body.encode(), {"DELAY": level}))

    def idle(self) -> list[str]:
        """Do everything that is due now."""
        self._app.run_until_idle()
        return self._printed()

    def advance(self, span: str) -> list[str]:
        """Let time pass."""
        self._app.advance(span)
        return self._printed()

    def committed(self, group: str = "billing", topic: str = "orders") -> list[str]:
        return [f"{self._app.committed(group, topic) or 0}"]

    def bodies(self, topic: str) -> list[str]:
        return [" ".join(self._app.bodies(topic)) or "none"]

    def letter(self, *fields: str) -> list[str]:
        """Print the body and fields of the only dead letter; ``field:10`` only ten characters."""
        queue = MessageQueue("%DLQ%billing", self._app.broker.name, 0)
        [dead] = self._app.broker.reader.pull(queue, 0).messages
        cut = {name: int(count or 10_000) for name, _, count in (field.partition(":") for field in fields)}
        found = (
            f"{name}={dead.properties.get(getattr(dead_letter, name.upper()))}"[: len(name) + 1 + cut[name]]
            for name in cut
        )
        return [" ".join([dead.body.decode()[:20], *found])]

    def logs(self, *fields: str) -> list[str]:
        """Print the events from ``info`` on, with these fields; of ``field:10`` only ten characters."""
        events = [each for each in self._logs if each["log_level"] != "debug" and each["event"] not in QUIET]
        self._logs.clear()
        cut = {name: int(count or 10_000) for name, _, count in (field.partition(":") for field in fields)}
        return [
            f"{each['log_level']} {each['event']}"
            + "".join(f" {name}={str(each[name])[:count]}" for name, count in cut.items() if name in each)
            for each in events
        ]

    def started(self) -> list[str]:
        """Print how the listener retries, as its start says."""
        return [each["retry"] for each in self._logs if each["event"] == "listener.started"]

    def refused(self, topic: str = "'orders'", group: str = "billing", **attributes: str) -> list[str]:
        """Print the error of a declaration."""

        def register() -> None:
            given: Any = {"id": "bill"} | {name: self._value(text) for name, text in attributes.items()}
            with EmbeddedBroker(None, clock=VirtualClock()) as broker:
                App(broker).registry.register(message_listener(self._value(topic), group, **given)(_take))

        return _error_of(register)

    def refuse(self, error: str, only: str = "") -> None:
        """Let the broker take no message back; with *only*, none with this option."""
        consumer = self._container.member.consumer
        take_back = consumer.send_back

        def send_back(message: MessageExt, delay_level: int = 0, **options: Any) -> None:
            if not only or only in options:
                raise self._value(error)
            take_back(message, delay_level, **options)

        consumer.send_back = send_back  # type: ignore[method-assign]

    # --- pause and positions -----------------------------------------------------------------------

    def stop(self) -> list[str]:
        self._container.stop()
        return self._printed()

    def start(self) -> None:
        self._container.start()

    def pause(self) -> None:
        self._container.pause()

    def resume(self) -> None:
        self._container.resume()

    def seek(self, offset: str, topic: str = "orders") -> list[str]:
        queue = MessageQueue(topic, self._app.broker.name, 0)
        return _error_of(lambda: self._container.seek(queue, int(offset)))

    def rewind(self, span: str = "None") -> list[str]:
        return _error_of(lambda: self._container.rewind(self._value(span)))

    def reset(self, time: str) -> list[str]:
        """Continue at a time: an expression that may use *start_ms*."""
        return _error_of(lambda: self._container.reset_to_time(self._value(time, start_ms=self._start_ms)))


def _take(body: str) -> None:
    """Handle nothing."""


def _fail(error: BaseException) -> None:
    raise error


def _error_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except (ListenerError, UnsupportedError, TypeError, ValueError) as error:
        return [f"{type(error).__name__}: {error}"]
    return []


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.feature("C2", "C8", "F1", "U13", "U18", "U19", "X8", "X14", "error-handler")
@pytest.mark.parametrize(("script", "mode"), SCRIPTS, ids=[f"{path.stem}-{mode}" for path, mode in SCRIPTS])
def test_a_listener_does_as_the_script_says(script: Path, mode: str, undo: contextlib.ExitStack) -> None:
    with capture_logs() as logs:
        check_script(script, Commands(mode, logs, undo))
        undo.close()
