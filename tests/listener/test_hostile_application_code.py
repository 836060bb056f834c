"""Hostile application code in every consume mode: its message is settled by the policy, and the listener goes on.

The messages are settled as after any failure: retried after 100 ms, then a dead letter; in place where the listener is
orderly; dropped where it is broadcasting. The messages after it are handled, and no thread ends.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import pytest

from mqtemplate import (
    ConsumeMode,
    Delivery,
    Depends,
    EmbeddedBroker,
    EmbeddedSettings,
    MessageModel,
    message_listener,
)
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ContainerState, ListenerRegistry
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.topics import DLQ_TOPIC_PREFIX
from mqtemplate.user_code import is_interrupt
from tests.kit import application, both_kinds, handler_of
from tests.listener.hostile import ATTEMPTS, KINDS, Panic, Raise, WithoutAnything
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from tests.listener.conftest import App

ANYWHERE = HostAddress("127.0.0.1", 0)
DEAD_LETTERS = f"{DLQ_TOPIC_PREFIX}billing"

MODES: dict[str, dict[str, Any]] = {
    "concurrently": {},
    "orderly": {"consume_mode": ConsumeMode.ORDERLY},
    "batch": {"is_batch": True},
    "orderly batch": {"is_batch": True, "consume_mode": ConsumeMode.ORDERLY},
    "broadcasting": {"message_model": MessageModel.BROADCASTING},
}
in_every_mode = pytest.mark.parametrize("mode", MODES)


class Shop:
    """A listener whose handler raises for the messages that name a kind of exception, and counts all calls."""

    def __init__(self, kinds: dict[str, Raise] | None = None) -> None:
        self.kinds = dict(KINDS) if kinds is None else kinds
        self.calls: Counter[str] = Counter()

    def listener(self, mode: str, *, is_async: bool, **attributes: Any) -> object:
        policy = {} if mode == "broadcasting" else {"retry": ["100ms"], "max_reconsume_times": 1}
        attributes = {"id": "bill", "consume_thread_number": 2} | policy | MODES[mode] | attributes
        is_batch = attributes.pop("is_batch", False)
        if is_batch:
            # One message a call: a batch that fails as a whole would take the others with it.
            attributes |= {"consume_message_batch_max_size": 1, "pull_batch_size": 1}

        def handle_batch(bodies: list[str]) -> None:
            self._handle(*bodies)

        async def handle_batch_async(bodies: list[str]) -> None:
            self._handle(*bodies)

        batches = handle_batch_async if is_async else handle_batch
        handler: Any = batches if is_batch else handler_of(self._handle, is_async)
        return message_listener("orders", "billing", **attributes)(handler)

    def _handle(self, body: str) -> None:
        self.calls[body] += 1
        if body in self.kinds:
            self.kinds[body]()


def attempts_of(kind: str, mode: str) -> int:
    return 1 if mode == "broadcasting" else ATTEMPTS.get(kind, 2)


def settle(
    app: App,
    shop: Shop,
    mode: str,
    is_async: bool,
    kind: str = "bad",
    *,
    calls: int | None = None,
    install: Callable[[], object] = lambda: None,
    **attributes: Any,
) -> None:
    """Let a listener handle a hostile message and two others, on the virtual clock, and check what holds after it.

    Args:
        calls: Number of calls of the handler with the hostile message; by default as the policy says.
        install: Called when the listener has started.
    """
    container = app.listen(shop.listener(mode, is_async=is_async, **attributes))
    install()
    app.send("orders", kind, "good", "better")
    app.advance("1s")

    expected = attempts_of(kind, mode) if calls is None else calls
    assert shop.calls == Counter({kind: expected, "good": 1, "better": 1})
    assert app.bodies(DEAD_LETTERS) == ([] if mode == "broadcasting" else [kind])
    assert (container.state, container.in_flight) == (ContainerState.RUNNING, 0)
    assert app.registry.is_ready
    if mode != "broadcasting":
        assert app.committed("billing") == 3


# --- on the virtual clock -------------------------------------------------------------------------


@in_every_mode
@both_kinds
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_handler_raises_fails_its_message_and_nothing_else(
    app: App, kind: str, mode: str, is_async: bool
) -> None:
    settle(app, Shop(), mode, is_async, kind)


class Raising:
    """Middleware that raises for the bad message: before the handler, after it, or at its own end."""

    def __init__(self, error: BaseException, at: str) -> None:
        self._error = error
        self._at = at

    def consume(self, delivery: Delivery) -> Generator[Delivery, object, None]:
        at = self._at if delivery.message.body == b"bad" else ""
        if at == "before":
            raise self._error
        yield delivery
        if at == "after":
            raise self._error
        if at == "at its end":
            try:
                yield delivery
            except GeneratorExit:
                raise self._error from None


class RaisingAsync(Raising):
    async def consume(self, delivery: Delivery) -> Any:
        yield delivery
        if delivery.message.body == b"bad":
            raise self._error


PLACES: dict[str, type[Raising]] = {"before": Raising, "after": Raising, "at its end": Raising, "async": RaisingAsync}
ERRORS: dict[str, Callable[[], BaseException]] = {
    "panic": Panic,
    "interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
    "without anything": WithoutAnything,
}
every_error = pytest.mark.parametrize("error", ERRORS)


@in_every_mode
@both_kinds
@every_error
@pytest.mark.parametrize("place", PLACES)
def test_whatever_a_middleware_raises_fails_its_message_and_nothing_else(
    app: App, place: str, error: str, mode: str, is_async: bool
) -> None:
    middleware = PLACES[place](ERRORS[error](), place)
    settle(app, Shop({}), mode, is_async, calls=0 if place == "before" else None, middlewares=[middleware])


@in_every_mode
@both_kinds
@every_error
def test_whatever_an_error_handler_raises_fails_the_message(app: App, error: str, mode: str, is_async: bool) -> None:
    def decide(_error: BaseException, _message: object) -> None:
        raise ERRORS[error]()

    settle(app, Shop({"bad": lambda: 1 / 0}), mode, is_async, error_handler=decide)


class HostileConverter(JsonMessageConverter):
    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self._error = error
        self.reads = 0

    def from_body(self, body: bytes, target: Any, properties: Any = None) -> Any:
        if body == b"bad":
            self.reads += 1
            raise self._error()
        return super().from_body(body, target, properties)


@in_every_mode
@both_kinds
@every_error
def test_whatever_a_converter_raises_fails_the_message(app: App, error: str, mode: str, is_async: bool) -> None:
    converter = HostileConverter(ERRORS[error])
    app.registry = ListenerRegistry(app.broker, converter)
    settle(app, Shop({}), mode, is_async, calls=0)

    assert converter.reads == attempts_of("bad", mode)


def open_session(message: MessageExt) -> Iterator[str]:
    """Raise the error that the tag names: before the handler, or after it."""
    if message.body == b"before":
        raise ERRORS[str(message.tags)]()
    yield "session"
    if message.body == b"after":
        raise ERRORS[str(message.tags)]()


@both_kinds
@every_error
def test_whatever_a_provider_raises_fails_the_message(app: App, error: str, is_async: bool) -> None:
    calls: list[str] = []

    def handle(body: str, session: Annotated[str, Depends(open_session)]) -> None:
        calls.append(body)

    async def handle_async(body: str, session: Annotated[str, Depends(open_session)]) -> None:
        calls.append(body)

    handler: Any = handle_async if is_async else handle
    container = app.listen(message_listener("orders", "billing", max_reconsume_times=0)(handler))
    app.send("orders", "before", "after", "good", tag=error)
    app.advance("1s")

    assert app.bodies(DEAD_LETTERS) == ["before", "after"]
    assert calls == ["after", "good"]
    assert container.in_flight == 0


@in_every_mode
@both_kinds
def test_ctrl_c_ends_the_step_and_loses_no_message(app: App, mode: str, is_async: bool) -> None:
    """On the virtual clock a handler runs in the thread of the test, where Ctrl-C arrives; no message is to blame."""
    keys = [signal.SIGINT]

    def press() -> None:
        if keys:
            signal.raise_signal(keys.pop())

    shop = Shop({"good": press})
    container = app.listen(shop.listener(mode, is_async=is_async))

    app.send("orders", "good", "better")
    with pytest.raises(KeyboardInterrupt):
        app.advance("1s")
    before = app.committed("billing")
    app.advance("10s")

    assert before in (None, 0)
    assert shop.calls["good"] in (1, 2)
    assert shop.calls["better"] == 1
    assert app.bodies(DEAD_LETTERS) == []
    assert (container.state, container.in_flight) == (ContainerState.RUNNING, 0)


# --- logging ---------------------------------------------------------------------------------------


class Hostile(logging.Handler):
    """A handler, and a filter, that raises."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self._error = error

    def handle(self, record: logging.LogRecord) -> bool:
        raise self._error()

    filter = handle


@pytest.fixture(params=["filter", "handler", "factory"])
def hostile_logging(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], BaseException]], None]]:
    """Let all logging of the library raise from now on."""
    logger, factory = logging.getLogger("mqtemplate.listener"), logging.getLogRecordFactory()
    installed: list[Hostile] = []

    def install(error: Callable[[], BaseException]) -> None:
        def make(*_: Any, **__: Any) -> logging.LogRecord:
            raise error()

        installed.append(Hostile(error))
        if request.param == "factory":
            logging.setLogRecordFactory(make)
        else:
            (logger.addFilter if request.param == "filter" else logger.addHandler)(installed[-1])

    yield install
    logging.setLogRecordFactory(factory)
    for each in installed:
        logger.removeFilter(each)
        logger.removeHandler(each)


@in_every_mode
@both_kinds
@every_error
def test_whatever_logging_raises_messages_are_settled(
    app: App, hostile_logging: Callable[[Any], None], error: str, mode: str, is_async: bool
) -> None:
    settle(app, Shop({"bad": lambda: 1 / 0}), mode, is_async, install=lambda: hostile_logging(ERRORS[error]))


@both_kinds
def test_a_hanging_handler_is_replaced_though_logging_raises(threaded_app: App, is_async: bool) -> None:
    """Its message is sent back by the polling thread, which also has to live."""
    started, release, handled = threading.Event(), threading.Event(), list[str]()

    def handle(body: str) -> None:
        handled.append(body)
        if body == "bad":
            started.set()
            release.wait(PATIENCE_S)

    async def handle_async(body: str) -> None:
        await asyncio.to_thread(handle, body)

    handler: Any = handle_async if is_async else handle
    listener = message_listener(
        "orders", "billing", max_reconsume_times=0, consume_thread_number=1, consume_thread_max=2
    )
    logger, hostile = logging.getLogger("mqtemplate.listener"), Hostile(Panic)
    logger.addFilter(hostile)
    try:
        container = threaded_app.listen(listener(handler), consume_timeout_ms=100)
        threaded_app.send("orders", "bad", "good")
        assert started.wait(PATIENCE_S)
        eventually(lambda: "good" in handled, "another thread handles the next message")
        eventually(lambda: threaded_app.bodies(DEAD_LETTERS) == ["bad"], "the hanging one is a dead letter")
        assert container.state is ContainerState.RUNNING
    finally:
        release.set()
        logger.removeFilter(hostile)


# --- with threads, embedded and on our server -------------------------------------------------------


def names_of_threads() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate())


def run_all(broker: Any, mode: str, *, is_async: bool, dead_letters: Callable[[], list[str]]) -> None:
    """Let one listener with two threads handle a message of each kind, and others between them."""
    shop, others = Shop(), [f"good-{number}" for number in range(len(KINDS))]
    registry = ListenerRegistry(broker, JsonMessageConverter())
    [container] = registry.register(shop.listener(mode, is_async=is_async))
    registry.start()
    try:
        eventually(lambda: len(container.positions()) >= 4 or mode == "broadcasting", "the queues are assigned")
        queues = sorted(broker.queues("orders"))

        def send(bodies: list[str]) -> None:
            for number, body in enumerate(bodies):
                broker.sends.send(Message("orders", body.encode()), queues[number % len(queues)])

        send(["first", *(body for pair in zip(KINDS, others, strict=True) for body in pair), "last"])
        eventually(lambda: all(shop.calls[each] for each in ["first", *others, "last"]), "the others are handled")
        eventually(
            lambda: all(shop.calls[kind] == attempts_of(kind, mode) for kind in KINDS),
            f"each is called as often as the policy says: {shop.calls}",
        )
        eventually(lambda: container.in_flight == 0, "all are settled")
        if mode != "broadcasting":
            eventually(lambda: sorted(dead_letters()) == sorted(KINDS), "the hostile ones are dead letters")
        assert registry.is_ready
        threads = names_of_threads()
        send([f"again-{number}" for number in range(20)])
        eventually(lambda: all(shop.calls[f"again-{number}"] for number in range(20)), "the listener goes on")
        assert [name for name in threads - names_of_threads() if "poll" in name or "loop" in name] == []
        assert all(shop.calls[each] == 1 for each in [*others, "first", "last"])
    finally:
        registry.stop()
    eventually(
        lambda: not [name for name in names_of_threads() if name.startswith("mqtemplate-bill")],
        "the threads of the listener have ended",
    )


@in_every_mode
@both_kinds
def test_threads_of_a_listener_outlive_all_of_it(mode: str, is_async: bool) -> None:
    with EmbeddedBroker(None) as broker:
        broker.create_topic("orders", 4)

        def dead_letters() -> list[str]:
            queue = MessageQueue(DEAD_LETTERS, broker.name, 0)
            return [message.body.decode() for message in broker.reader.pull(queue, 0, 1_000).messages]

        run_all(broker, mode, is_async=is_async, dead_letters=dead_letters)


@in_every_mode
@both_kinds
def test_threads_of_a_listener_on_our_server_outlive_all_of_it(mode: str, is_async: bool, tmp_path: Any) -> None:
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE))
    with engine, LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE)) as cluster:
        settings = RemoteSettings(name_servers=(str(cluster.address),), offset_path=tmp_path)
        with RemoteBroker(settings) as broker:
            broker.create_topic("orders", 4)

            def dead_letters() -> list[str]:
                queue = MessageQueue(DEAD_LETTERS, engine.name, 0)
                return [message.body.decode() for message in engine.reader.pull(queue, 0, 1_000).messages]

            run_all(broker, mode, is_async=is_async, dead_letters=dead_letters)


@pytest.mark.parametrize("kind", ["interrupt", "exit", "cancelled", "panic"])
def test_a_handler_on_the_loop_of_the_program_does_not_end_the_program(kind: str) -> None:
    """It runs in the main thread there, and raises itself what a signal would raise."""
    handled: list[str] = []

    async def handle(body: str) -> None:
        handled.append(body)
        if body == "bad":
            KINDS[kind]()

    async def program() -> None:
        listener = message_listener("orders", "billing", max_reconsume_times=0)(handle)
        async with application(listener, clock=None) as app:
            for body in ("bad", "good"):
                await app.template.async_send("orders", body)
            await asyncio.to_thread(eventually, lambda: len(handled) == 2, "both are handled")
            await asyncio.to_thread(eventually, lambda: app.containers[0].in_flight == 0, "both are settled")
            assert app.is_ready.is_set()

    asyncio.run(program())

    assert sorted(handled) == ["bad", "good"]


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_exception_of_a_signal_is_known_from_one_that_code_raises() -> None:
    """Ctrl-C with Python's own handler, and SIGTERM with one of the program that raises SystemExit."""

    def end(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        by_signals = [raised_by(partial(signal.raise_signal, each)) for each in (signal.SIGINT, signal.SIGTERM)]
        by_code = [raised_by(KINDS[kind]) for kind in ("interrupt", "exit", "sys.exit", "panic", "memory")]
        assert [is_interrupt(error) for error in by_signals] == [True, True]
        assert [is_interrupt(error) for error in by_code] == [False] * 5
    finally:
        signal.signal(signal.SIGTERM, before)
