"""Middlewares around handlers: what they see, change and drop, and the kinds of handlers they work around."""

from __future__ import annotations

from asyncio import sleep as virtual_sleep
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import mqtemplate
from mqtemplate import (
    BatchFailure,
    ConsumeMode,
    ConsumeStatus,
    Delivery,
    MessageExt,
    PauseListener,
    RetryLater,
    ScheduledRun,
    Timing,
    message_listener,
    middleware,
    scheduled,
)
from mqtemplate.errors import ConfigurationError, DependencyError, ListenerError
from mqtemplate.testing.harness import StartApp
from tests.kit import Kit

Consuming = Generator[Delivery, object, object]


class Noting:
    """Notes what happens before and after the handler."""

    def __init__(self, events: list[Any], name: str) -> None:
        self.events = events
        self.name = name

    def consume(self, delivery: Delivery) -> Consuming:
        self.events.append(f"{self.name} before")
        try:
            result = yield delivery
        except Exception as error:
            self.events.append(f"{self.name} {type(error).__name__}")
            raise
        self.events.append(f"{self.name} after {result}")
        return result


class NotingAsync(Noting):
    async def consume(self, delivery: Delivery) -> AsyncGenerator[Delivery, object]:  # type: ignore[override]
        await virtual_sleep(0)
        self.events.append(f"{self.name} before")
        try:
            result = yield delivery
        except Exception as error:
            self.events.append(f"{self.name} {type(error).__name__}")
            raise
        await virtual_sleep(0)
        self.events.append(f"{self.name} after {result}")


def handler(is_async: bool, handle: Callable[[str], object]) -> Callable[..., Any]:
    """Return a plain or an async handler that calls a function."""

    def plain(order: str) -> object:
        return handle(order)

    async def with_await(order: str) -> object:
        await virtual_sleep(0)
        return handle(order)

    return with_await if is_async else plain


BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


@BOTH
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(Noting, Noting), (Noting, NotingAsync), (NotingAsync, Noting), (NotingAsync, NotingAsync)],
)
def test_middlewares_are_around_the_handler_in_their_order(
    kit: Kit, is_async: bool, outer: type[Noting], inner: type[Noting]
) -> None:
    """Plain and async ones, in any mixture, around plain and async handlers."""
    events: list[Any] = []
    listen = message_listener("orders", "billing", middlewares=[outer(events, "outer"), inner(events, "inner")])
    kit.start(listen(handler(is_async, events.append)))

    kit.template.sync_send("orders", "tea")
    kit.harness.run_until_idle()

    assert events == ["outer before", "inner before", "tea", "inner after None", "outer after None"]


@BOTH
@pytest.mark.parametrize("kind", [Noting, NotingAsync])
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_middleware_sees_the_exception_and_each_attempt(kit: Kit, is_async: bool, kind: type[Noting]) -> None:
    events: list[Any] = []
    attempts: list[int] = []

    class Attempts:
        def consume(self, delivery: Delivery) -> Consuming:
            attempts.append(delivery.attempt)
            yield delivery

    def fail_once(order: str) -> None:
        if len(attempts) == 1:
            raise OSError("bank is down")

    listen = message_listener("orders", "billing", retry=["5s"], middlewares=[Attempts(), kind(events, "outer")])
    kit.start(listen(handler(is_async, fail_once)))
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("5s")

    assert attempts == [1, 2]
    assert events == ["outer before", "outer OSError", "outer before", "outer after None"]


@BOTH
def test_a_middleware_changes_the_message_before_it_is_converted(kit: Kit, is_async: bool) -> None:
    """It passes on a changed copy; a retry gets the message as it was fetched."""
    got: list[str] = []

    class Decrypt:
        def consume(self, delivery: Delivery) -> Consuming:
            yield delivery.map(lambda each: replace(each, body=each.body[::-1]))

    def fail_once(order: str) -> None:
        got.append(order)
        if len(got) == 1:
            raise RetryLater("1s")

    listen = message_listener("orders", "billing", middlewares=[Decrypt()])
    kit.start(listen(handler(is_async, fail_once)))
    kit.template.sync_send("orders", "aet")
    kit.harness.advance("1s")

    assert got == ["tea", "tea"]


@BOTH
def test_a_message_is_dropped_by_a_middleware_that_ends_without_yield(kit: Kit, is_async: bool) -> None:
    """It counts as done and is not delivered again."""
    got: list[str] = []
    seen: list[str | None] = []

    class OnlyPaid:
        def consume(self, delivery: Delivery) -> Consuming:
            seen.append(delivery.message.user_properties.get("paid"))
            if seen[-1] == "yes":
                yield delivery

    listen = message_listener("orders", "billing", middlewares=[OnlyPaid()])
    kit.start(listen(handler(is_async, got.append)))
    kit.template.sync_send("orders", "tea", headers={"paid": "no"})
    kit.template.sync_send("orders", "cup", headers={"paid": "yes"})
    kit.harness.advance("3h")

    assert (sorted(map(str, seen)), got) == (["no", "yes"], ["cup"])


@BOTH
def test_a_message_that_is_filtered_out_is_dropped(kit: Kit, is_async: bool) -> None:
    got: list[str] = []

    class Nothing:
        def consume(self, delivery: Delivery) -> Consuming:
            yield delivery.filter(lambda _: False)

    kit.start(message_listener("orders", "billing", middlewares=[Nothing()])(handler(is_async, got.append)))
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("3h")

    assert got == []


def test_an_async_middleware_may_drop_a_message(kit: Kit) -> None:
    got: list[str] = []

    class Nothing:
        async def consume(self, delivery: Delivery) -> AsyncGenerator[Delivery, object]:
            if delivery.attempt > 1:
                yield delivery

    for is_async in (False, True):
        listen = message_listener("orders", f"group-{is_async}", middlewares=[Nothing()])
        kit.start(listen(handler(is_async, got.append)))
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("3h")

    assert got == []


@BOTH
def test_a_middleware_may_suppress_an_exception(kit: Kit, is_async: bool) -> None:
    """The message is done then: without a retry and without a failure."""
    calls: list[str] = []

    class Lenient:
        def consume(self, delivery: Delivery) -> Consuming:
            try:
                yield delivery
            except KeyError:
                calls.append("suppressed")

    def fail(order: str) -> None:
        raise KeyError(order)

    kit.start(message_listener("orders", "billing", middlewares=[Lenient()])(handler(is_async, fail)))
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("3h")

    assert calls == ["suppressed"]


@BOTH
def test_a_middleware_replaces_the_reply_or_replies_itself(kit: Kit, is_async: bool) -> None:
    """Of a request; the handler is not called if the middleware does not yield."""

    class Cache:
        def consume(self, delivery: Delivery) -> Consuming:
            if delivery.message.body == b"cup":
                return "from the cache"
            result = yield delivery
            return f"{result}!"

    listen = message_listener("prices", "prices", middlewares=[Cache()])
    kit.start(listen(handler(is_async, lambda article: f"{article} is 320")))

    assert kit.template.send_and_receive("prices", "tea", str) == "tea is 320!"
    assert kit.template.send_and_receive("prices", "cup", str) == "from the cache"


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_middleware_that_raises_fails_the_message(kit: Kit) -> None:
    got: list[str] = []
    calls: list[int] = []

    class Broken:
        def consume(self, delivery: Delivery) -> Consuming:
            calls.append(delivery.attempt)
            if delivery.attempt == 1:
                raise OSError("no audit")
            yield delivery

    kit.start(message_listener("orders", "billing", retry=["1s"], middlewares=[Broken()])(handler(False, got.append)))
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("1s")

    assert (calls, got) == ([1, 2], ["tea"])


@BOTH
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_the_stack_of_a_dead_letter_is_that_of_the_users_code(kit: Kit, is_async: bool) -> None:
    """The middlewares of the user are in it, and what drives them is not."""

    def fail(order: str) -> None:
        raise KeyError(order)

    listen = message_listener("orders", "billing", max_reconsume_times=0, middlewares=[Timing(), Noting([], "outer")])
    kit.start(listen(handler(is_async, fail)))
    kit.template.sync_send("orders", "tea")
    kit.harness.run_until_idle()

    [letter] = kit.harness.assert_dead_lettered("billing")
    stack = letter.properties["dead_letter_stack"]
    assert "in consume" in stack
    assert stack.endswith("KeyError: 'tea'")
    assert str(Path(mqtemplate.__file__).parent) not in stack


@BOTH
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_second_yield_is_an_error(kit: Kit, is_async: bool) -> None:
    class Twice:
        def consume(self, delivery: Delivery) -> Consuming:
            yield delivery
            yield delivery

    class TwiceAsync:
        async def consume(self, delivery: Delivery) -> AsyncGenerator[Delivery, object]:
            yield delivery
            yield delivery

    for number, each in enumerate((Twice(), TwiceAsync())):
        listen = message_listener("orders", f"group-{number}", retry_for=(OSError,), middlewares=[each])
        kit.start(listen(handler(is_async, str)))
    kit.template.sync_send("orders", "tea")
    kit.harness.run_until_idle()

    assert [str(failure.error).partition(";")[0].rpartition(".")[2] for failure in kit.harness.failures] == [
        "consume yielded twice",
        "consume yielded twice",
    ]


# --- batches and ordered listeners ----------------------------------------------------------------


@BOTH
def test_a_batch_passes_the_middlewares_once(kit: Kit, is_async: bool) -> None:
    """The messages that are filtered out count as done; those that are changed are converted after it."""
    seen: list[tuple[int, int]] = []
    got: list[list[str]] = []

    class Upper:
        def consume(self, delivery: Delivery) -> Consuming:
            kept = delivery.filter(lambda each: each.body != b"salt")
            seen.append((len(delivery.messages), len(kept.messages)))
            yield kept.map(lambda each: replace(each, body=each.body.upper()))

    if is_async:

        @message_listener("orders", "billing", middlewares=[Upper()])
        async def handle_async(orders: list[str]) -> None:
            got.append(orders)

        kit.start(handle_async)
    else:

        @message_listener("orders", "billing", middlewares=[Upper()])
        def handle(orders: list[str]) -> None:
            got.append(orders)

        kit.start(handle)

    kit.template.sync_send("orders", ["tea", "salt", "cup"])
    kit.harness.advance("3h")

    assert (seen, got) == ([(3, 2)], [["TEA", "CUP"]])


@BOTH
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_indices_of_a_filtered_batch_mean_the_messages_that_the_handler_got(
    kit: Kit, is_async: bool, raises: bool
) -> None:
    """Only the failed message is delivered again, as it was fetched."""
    got: list[list[str]] = []

    class WithoutFirst:
        def consume(self, delivery: Delivery) -> Consuming:
            kept = delivery.filter(lambda each: each.body != b"salt")
            yield kept.map(lambda each: replace(each, body=each.body.upper()))

    def fail_last(orders: list[str]) -> list[int]:
        got.append(orders)
        if len(orders) == 1:
            return []
        if raises:
            raise BatchFailure([1])
        return [1]

    if is_async:

        @message_listener("orders", "billing", retry=["1s"], middlewares=[WithoutFirst()])
        async def handle_async(orders: list[str]) -> list[int]:
            return fail_last(orders)

        kit.start(handle_async)
    else:

        @message_listener("orders", "billing", retry=["1s"], middlewares=[WithoutFirst()])
        def handle(orders: list[str]) -> list[int]:
            return fail_last(orders)

        kit.start(handle)
    kit.template.sync_send("orders", ["salt", "tea", "cup"])
    kit.harness.advance("3h")

    assert got == [["TEA", "CUP"], ["CUP"]]


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_middleware_may_fail_some_messages_of_a_batch(kit: Kit) -> None:
    """Its indices count the messages that it got. An invalid body still fails alone."""
    got: list[list[int]] = []

    class Strict:
        def consume(self, delivery: Delivery) -> Consuming:
            yield delivery
            if len(delivery.messages) == 3:
                raise BatchFailure([0])

    @message_listener("orders", "billing", retry=["1s"], middlewares=[Strict()])
    def handle(orders: list[int]) -> None:
        got.append(orders)

    kit.start(handle)
    kit.template.sync_send("orders", [b"1", b"2", b"no number"])
    kit.harness.advance("3h")

    assert got == [[1, 2], [1]]
    kit.harness.assert_dead_lettered("billing", times=1)


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_the_order_of_a_queue_stays_while_a_middleware_fails_and_drops(kit: Kit) -> None:
    got: list[str] = []
    attempts: list[tuple[bytes, int]] = []

    class Gate:
        def consume(self, delivery: Delivery) -> Consuming:
            attempts.append((delivery.message.body, delivery.attempt))
            if delivery.message.body == b"b" and delivery.attempt == 1:
                raise OSError("try again")
            if delivery.message.body != b"c":
                yield delivery

    kit.start(
        message_listener("orders", "billing", consume_mode=ConsumeMode.ORDERLY, middlewares=[Gate()])(
            handler(False, got.append)
        )
    )
    for body in ("a", "b", "c", "d"):
        kit.template.sync_send("orders", body, hash_key="one")
    kit.harness.advance("1m")

    assert got == ["a", "b", "d"]
    assert attempts == [(b"a", 1), (b"b", 1), (b"b", 2), (b"c", 1), (b"d", 1)]


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_requested_redelivery_is_a_result(kit: Kit) -> None:
    results: list[object] = []
    done: list[bool] = []

    class Results:
        def consume(self, delivery: Delivery) -> Consuming:
            result = yield delivery
            results.append(result)
            done.append(delivery.listener.is_done(result))

    @message_listener("orders", "billing", retry=["1s"], middlewares=[Results()])
    def handle(order: str, message: MessageExt) -> ConsumeStatus | None:
        return None if message.reconsume_times else ConsumeStatus.RECONSUME_LATER

    kit.start(handle)
    kit.template.sync_send("orders", "tea")
    kit.harness.advance("1s")

    assert (results, done) == ([ConsumeStatus.RECONSUME_LATER, None], [False, True])


# --- registration ---------------------------------------------------------------------------------

ORDER: list[str] = []


@dataclass
class Audit:
    """A service that a middleware gets."""

    name: str = "audit"


class Named:
    def consume(self, delivery: Delivery) -> Consuming:
        ORDER.append(type(self).__name__)
        yield delivery


@middleware
class Second(Named):
    def __init__(self, audit: Audit) -> None:
        self.audit = audit


@middleware(order=-1)
class First(Named): ...


class Configured(Named): ...


class OfListener(Named):
    def __init__(self, audit: Audit) -> None:
        self.audit = audit


@message_listener("orders", "billing", middlewares=[OfListener, f"{__name__}.Configured"])
def bill(order: str) -> None:
    ORDER.append(order)


def test_global_middlewares_are_outside_of_those_of_a_listener(kit: Kit) -> None:
    """By order, then from the configuration, then by registration. Classes get their services."""
    ORDER.clear()
    kit.start(bill, Second, First, Audit, settings={"mqtemplate.middlewares": f"{__name__}.Configured"})

    kit.template.sync_send("orders", "tea")
    kit.harness.run_until_idle()

    assert ORDER == ["First", "Configured", "Second", "OfListener", "Configured", "tea"]


def test_middlewares_of_the_library_can_be_configured_by_name(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """With the defaults of their arguments."""

    @message_listener("orders", "billing")
    def handle(order: str) -> None: ...

    names = "mqtemplate.Timing, mqtemplate.Deduplication, mqtemplate.CircuitBreaker"
    kit.start(handle, settings={"mqtemplate.middlewares": names})
    kit.template.sync_send("orders", "tea")
    kit.harness.run_until_idle()

    assert "message.handled" in caplog.text


def test_a_function_or_an_object_can_be_marked(kit: Kit) -> None:
    events: list[Any] = []

    @middleware(order=5)
    def inner() -> Noting:
        return Noting(events, "inner")

    @message_listener("orders", "billing")
    def handle(order: str) -> None: ...

    kit.start(handle, inner, middleware(Configured()))
    ORDER.clear()
    kit.template.sync_send("orders", "tea")
    kit.harness.run_until_idle()

    assert (ORDER, events) == (["Configured"], ["inner before", "inner after None"])


@BOTH
@pytest.mark.parametrize("kind", [Noting, NotingAsync])
def test_global_middlewares_are_around_the_functions_of_schedules(kit: Kit, is_async: bool, kind: type[Noting]) -> None:
    """A run that a middleware drops is skipped, and the schedule goes on; a paused one is repeated."""
    events: list[Any] = []
    calls: list[int] = []

    class SecondIsDroppedThirdIsPaused:
        def consume(self, delivery: Delivery) -> Consuming:
            calls.append(delivery.attempt)
            if len(calls) == 3:
                raise PauseListener("1m")
            if len(calls) != 2:
                yield delivery

    @scheduled(every="1h", name="report")
    def report(run: ScheduledRun) -> None:
        events.append(run.scheduled_at.hour)

    @scheduled(every="1h", name="report")
    async def report_async(run: ScheduledRun) -> None:
        await virtual_sleep(0)
        events.append(run.scheduled_at.hour)

    kit.start(
        report_async if is_async else report,
        middleware(SecondIsDroppedThirdIsPaused()),
        middleware(order=1)(kind(events, "inner")),
    )
    kit.harness.advance("3h")
    kit.harness.advance("1m")

    assert calls == [1, 1, 1, 1]
    assert events == ["inner before", 1, "inner after None", "inner before", 3, "inner after None"]


class NoMethod: ...


class NoYield:
    def consume(self, delivery: Delivery) -> None: ...


class SendOnly:
    def send(self, outgoing: Any) -> Generator[Any, Any, None]:
        yield outgoing


class AsyncSend:
    async def send(self, outgoing: Any) -> AsyncGenerator[Any, Any]:
        yield outgoing


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (NoMethod(), "middleware NoMethod has neither consume nor send; write 'def consume"),
        (NoYield, "middleware NoYield: consume has no yield"),
        (SendOnly(), "SendOnly has no consume, so it does nothing for a listener; give it to the template"),
        (AsyncSend(), "middleware AsyncSend: send is async, and it runs in the thread that sends"),
        ("shop.missing.Audit", r"middlewares must be objects, classes, or dotted names .*got .'shop.missing"),
        (f"{__name__}.Missing", "middlewares must be objects, classes, or dotted names"),
        ("Audit", "middlewares must be objects, classes, or dotted names"),
        (OfListener, "parameter 'audit' needs Audit, and no object here is one"),
    ],
)
def test_what_is_no_middleware_is_refused_at_the_start(given: object, text: str, mqtemplate_app: StartApp) -> None:
    listen = message_listener("orders", "billing", middlewares=[given])

    with pytest.raises(ListenerError, match=text):
        mqtemplate_app(listen(handler(False, str)))


def test_a_class_without_a_method_cannot_be_marked() -> None:
    with pytest.raises(ConfigurationError, match="NoMethod has neither consume nor send"):
        middleware(NoMethod)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shop.missing.Audit", "must be dotted names of middlewares, such as shop.audit.Audit, got shop.missing.Audit"),
        (f"{__name__}.NoMethod", "middleware NoMethod has neither consume nor send"),
    ],
)
def test_a_configured_name_that_is_no_middleware_is_refused(name: str, text: str, mqtemplate_app: StartApp) -> None:
    with pytest.raises(ConfigurationError, match=text):
        mqtemplate_app(bill, Audit, settings={"mqtemplate.middlewares": name})


def test_a_middleware_that_lacks_a_service_is_refused_at_the_start(mqtemplate_app: StartApp) -> None:
    with pytest.raises(DependencyError, match="Second: parameter 'audit' needs Audit"):
        mqtemplate_app(Second)
