"""Event loops of ``async def`` handlers on the real clock: where they run, how many at once, and what may not block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import EventLoopBlockedError, ListenerError
from mqtemplate.listener import ListenerRegistry, message_listener
from mqtemplate.listener.container.loops import LoopThread, RunningLoop
from mqtemplate.template import RocketMQTemplate
from tests.listener.hostile import KINDS
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from tests.listener.conftest import App

PATIENCE_MS = PATIENCE_S * 1_000


def prices(template: RocketMQTemplate) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two handlers: the first one awaits the reply of the second one."""

    @message_listener(topic="orders", consumer_group="orders")
    async def order(article: str) -> str:
        return f"order: {await template.async_send_and_receive('prices', article, str, PATIENCE_MS)}"

    @message_listener(topic="prices", consumer_group="prices")
    async def price(article: str) -> str:
        return f"{article} is 320"

    return order, price


def test_a_handler_awaits_the_reply_of_another_handler(threaded_app: App) -> None:
    """Both run on one loop, which goes on while the first one waits."""
    template = RocketMQTemplate(threaded_app.broker)
    threaded_app.listen(*prices(template))

    assert template.send_and_receive("orders", "tea", str, PATIENCE_MS) == "order: tea is 320"


def test_a_blocking_request_in_a_handler_is_refused(threaded_app: App) -> None:
    """It would wait for a handler that cannot run before it returns. Nothing is sent."""
    template = RocketMQTemplate(threaded_app.broker)
    refused: SimpleQueue[BaseException] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="orders", max_reconsume_times=0)
    async def order(article: str) -> None:
        for wait in (
            lambda: template.send_and_receive("prices", article, str),
            lambda: template.async_send_and_receive("prices", article, str).result(),
        ):
            try:
                wait()
            except Exception as error:
                refused.put(error)

    threaded_app.listen(order)
    template.sync_send("orders", "tea")

    for _ in range(2):
        error = refused.get(timeout=PATIENCE_S)
        assert isinstance(error, EventLoopBlockedError)
        assert "would block this event loop" in str(error)
        assert "await" in str(error)


def test_blocking_sends_work_in_a_handler(threaded_app: App) -> None:
    """A send waits for no handler; it blocks the loop for the time of a flush."""
    template = RocketMQTemplate(threaded_app.broker)
    done: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="orders")
    async def order(article: str) -> None:
        done.put(template.sync_send("parcels", article).msg_id)

    threaded_app.listen(order)
    template.sync_send("orders", "tea")

    assert done.get(timeout=PATIENCE_S)


def test_a_blocking_request_works_on_a_loop_without_handlers(threaded_app: App) -> None:
    """In a notebook, for example, every cell runs on a loop."""
    template = RocketMQTemplate(threaded_app.broker)

    @message_listener(topic="prices", consumer_group="prices")
    def price(article: str) -> str:
        return f"{article} is 320"

    async def cell() -> str:
        threaded_app.listen(price)
        return template.send_and_receive("prices", "tea", str, PATIENCE_MS)

    assert asyncio.run(cell()) == "tea is 320"


def test_the_number_of_threads_bounds_the_coroutines_of_a_listener(threaded_app: App) -> None:
    running, most = set[str](), list[int]()
    entered: SimpleQueue[str] = SimpleQueue()
    release = threading.Event()

    @message_listener(topic="orders", consumer_group="orders", consume_thread_number=3)
    async def order(article: str) -> None:
        running.add(article)
        most.append(len(running))
        entered.put(article)
        await asyncio.to_thread(release.wait)
        running.discard(article)

    threaded_app.listen(order)
    articles = [str(number) for number in range(9)]
    threaded_app.send("orders", *articles)
    first = [entered.get(timeout=PATIENCE_S) for _ in range(3)]
    release.set()
    others = [entered.get(timeout=PATIENCE_S) for _ in range(6)]

    assert sorted(first + others) == articles
    assert max(most) == 3


# --- the loop of the application -------------------------------------------------------------------


@pytest.fixture
def broker() -> Any:
    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        yield broker


def test_handlers_run_on_the_loop_in_which_their_registry_was_created(broker: EmbeddedBroker) -> None:
    async def main() -> None:
        registry = ListenerRegistry(broker, JsonMessageConverter())
        handled: asyncio.Future[asyncio.AbstractEventLoop] = asyncio.get_running_loop().create_future()

        @message_listener(topic="orders", consumer_group="orders")
        async def order(article: str) -> None:
            handled.set_result(asyncio.get_running_loop())

        registry.register(order)
        registry.start()
        await RocketMQTemplate(broker).async_send("orders", "tea")

        assert await asyncio.wait_for(handled, PATIENCE_S) is asyncio.get_running_loop()
        await asyncio.to_thread(registry.stop)

    asyncio.run(main())


def test_a_blocking_request_on_the_loop_of_the_handlers_is_refused_before_the_first_message(
    broker: EmbeddedBroker,
) -> None:
    async def main() -> None:
        registry = ListenerRegistry(broker, JsonMessageConverter())
        registry.register(prices(RocketMQTemplate(broker))[1])
        registry.start()
        with pytest.raises(EventLoopBlockedError, match="await template.async_send_and_receive"):
            RocketMQTemplate(broker).send_and_receive("prices", "tea", str)
        registry.stop()

    asyncio.run(main())


def test_the_stop_of_one_application_does_not_allow_blocking_requests_beside_another(broker: EmbeddedBroker) -> None:
    """Both have their handlers on one loop."""

    async def main() -> None:
        first, second = (ListenerRegistry(broker, JsonMessageConverter()) for _ in range(2))
        order, price = prices(RocketMQTemplate(broker))
        for registry, handler in ((first, order), (second, price)):
            registry.register(handler)
            registry.start()
        first.stop()
        with pytest.raises(EventLoopBlockedError):
            RocketMQTemplate(broker).send_and_receive("prices", "tea", str)
        second.stop()

    asyncio.run(main())


def test_a_stop_on_the_loop_of_the_handlers_does_not_wait_for_them(broker: EmbeddedBroker) -> None:
    """They could not go on before it returns. Their messages stay uncommitted and are redelivered."""

    async def main() -> asyncio.Task[Any]:
        registry = ListenerRegistry(broker, JsonMessageConverter())
        handled: asyncio.Future[asyncio.Task[Any] | None] = asyncio.get_running_loop().create_future()

        @message_listener(
            topic="orders",
            consumer_group="orders",
            consume_from_where="CONSUME_FROM_FIRST_OFFSET",
            await_termination_millis_when_shutdown=3_600_000,
        )
        async def order(article: str) -> None:
            handled.set_result(asyncio.current_task())
            await asyncio.Event().wait()

        registry.register(order)
        registry.start()
        sent = await RocketMQTemplate(broker).async_send("orders", "tea")
        task = await asyncio.wait_for(handled, PATIENCE_S)
        registry.stop()

        assert task is not None
        assert not broker.groups.committed_offset("orders", sent.message_queue)
        await asyncio.wait([task], timeout=PATIENCE_S)
        return task

    with capture_logs() as logs:
        task = asyncio.run(main())

    assert task.cancelled()
    [stopped] = [line for line in logs if line["event"] == "listener.stopped"]
    assert stopped["unfinished"] == 1
    assert not [line for line in logs if line["event"] == "listener.failed"]


def test_handlers_of_a_loop_that_was_closed_fail_with_the_reason(broker: EmbeddedBroker) -> None:
    registry: list[ListenerRegistry] = []

    async def main() -> None:
        registry.append(ListenerRegistry(broker, JsonMessageConverter()))
        registry[0].register(prices(RocketMQTemplate(broker))[1])
        registry[0].start()

    with capture_logs() as logs:
        asyncio.run(main())
        RocketMQTemplate(broker).sync_send("prices", "tea")
        [failed] = eventually(
            lambda: [line for line in logs if line["event"] == "listener.failed"], "the handler failed"
        )
        registry[0].stop()

    error = failed["exc_info"]
    assert isinstance(error, ListenerError)
    assert "is closed, and its handlers run there; stop the application before the loop ends" in str(error)


def test_a_coroutine_on_the_loop_that_the_caller_blocks_is_refused() -> None:
    async def never() -> None:
        raise AssertionError

    async def main() -> None:
        with pytest.raises(EventLoopBlockedError, match=r"await start_async\(\) and stop_async\(\)"):
            RunningLoop(asyncio.get_running_loop()).run(never())

    asyncio.run(main())


def test_a_loop_of_its_own_ends_with_its_coroutines() -> None:
    loop = LoopThread()
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def start() -> None:
        tasks.append(asyncio.ensure_future(wait()))
        await asyncio.wait(tasks, timeout=0)

    tasks: list[asyncio.Future[None]] = []
    loop.run(start())
    loop.stop()

    assert cancelled.is_set()


@pytest.mark.parametrize("kind", ["exit", "interrupt", "panic"])
def test_the_loop_outlives_what_a_task_of_a_handler_raises(threaded_app: App, kind: str) -> None:
    """asyncio ends a loop for SystemExit of any task, and the handlers of all listeners use the loop."""
    handled: SimpleQueue[str] = SimpleQueue()

    async def background() -> None:
        KINDS[kind]()

    @message_listener("orders", "orders")
    async def order(article: str) -> None:
        if article == "bad":
            tasks.append(asyncio.create_task(background()))
        handled.put(article)

    tasks: list[asyncio.Task[None]] = []
    threaded_app.listen(order)
    threaded_app.send("orders", "bad", "good")
    assert sorted(handled.get(timeout=PATIENCE_S) for _ in range(2)) == ["bad", "good"]
    eventually(tasks[0].done, "the task has ended")
    threaded_app.send("orders", "better")

    assert handled.get(timeout=PATIENCE_S) == "better"
    assert isinstance(tasks[0].exception(), BaseException)


def test_a_stop_does_not_wait_for_ever_for_a_task_that_ignores_the_cancellation(
    threaded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqtemplate.listener.container.loops._CANCEL_S", 0.5)
    started, release = threading.Event(), threading.Event()

    @message_listener("orders", "orders", await_termination_millis_when_shutdown=0)
    async def order(article: str) -> None:
        started.set()
        while not release.is_set():
            try:
                await asyncio.to_thread(release.wait)
            except asyncio.CancelledError:
                continue

    threaded_app.listen(order)
    threaded_app.send("orders", "tea")
    assert started.wait(PATIENCE_S)
    with capture_logs() as events:
        threaded_app.registry.stop()
    release.set()

    assert "listener.tasks_not_cancelled" in [event["event"] for event in events]
