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
from tests.kit import Kit, both_kinds, handler_of

Consuming = Generator[Delivery, object, object]
FAILURES = pytest.mark.mqtemplate(raise_handler_errors=False)


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


class Around:
    """Middleware of two functions. The first one returns what is passed on, or None: it ends without ``yield``."""

    def __init__(
        self,
        before: Callable[[Delivery], Delivery | None] = lambda delivery: delivery,
        after: Callable[[object], object] = lambda result: result,
    ) -> None:
        self.before, self.after = before, after

    def consume(self, delivery: Delivery) -> Consuming:
        passed = self.before(delivery)
        return None if passed is None else self.after((yield passed))


class Lenient:
    def consume(self, delivery: Delivery) -> Consuming:
        try:
            yield delivery
        except KeyError:
            return None


class AsyncRetriesOnly:
    async def consume(self, delivery: Delivery) -> AsyncGenerator[Delivery, object]:
        if delivery.attempt > 1:
            yield delivery


class Twice:
    def consume(self, delivery: Delivery) -> Consuming:
        yield delivery
        yield delivery


class TwiceAsync:
    async def consume(self, delivery: Delivery) -> AsyncGenerator[Delivery, object]:
        yield delivery
        yield delivery


def listen(kit: Kit, handler: Any, *middlewares: object, **attributes: Any) -> None:
    """Start a listener of ``orders`` with middlewares."""
    kit.start(message_listener("orders", "billing", middlewares=list(middlewares), **attributes)(handler))


def fails_once(got: list[str], error: BaseException) -> Callable[[str], None]:
    def handle(order: str) -> None:
        got.append(order)
        if len(got) == 1:
            raise error

    return handle


def fail(order: str) -> None:
    raise KeyError(order)


@both_kinds
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(Noting, Noting), (Noting, NotingAsync), (NotingAsync, Noting), (NotingAsync, NotingAsync)],
)
def test_middlewares_are_around_the_handler_in_their_order(
    kit: Kit, is_async: bool, outer: type[Noting], inner: type[Noting]
) -> None:
    """Plain and async ones, in any mixture, around plain and async handlers."""
    events: list[Any] = []
    listen(kit, handler_of(events.append, is_async), outer(events, "outer"), inner(events, "inner"))

    kit.handle("tea")

    assert events == ["outer before", "inner before", "tea", "inner after None", "outer after None"]


@both_kinds
@pytest.mark.parametrize("kind", [Noting, NotingAsync])
@FAILURES
def test_a_middleware_sees_the_exception_and_each_attempt(kit: Kit, is_async: bool, kind: type[Noting]) -> None:
    events: list[Any] = []
    attempts: list[int] = []
    noting = Around(lambda delivery: attempts.append(delivery.attempt) or delivery)
    listen(kit, handler_of(fails_once([], OSError()), is_async), noting, kind(events, "outer"), retry=["5s"])

    kit.handle("tea", span="5s")

    assert attempts == [1, 2]
    assert events == ["outer before", "outer OSError", "outer before", "outer after None"]


@both_kinds
def test_a_middleware_changes_the_message_before_it_is_converted(kit: Kit, is_async: bool) -> None:
    """It passes on a changed copy; a retry gets the message as it was fetched."""
    got: list[str] = []
    decrypt = Around(lambda delivery: delivery.map(lambda each: replace(each, body=each.body[::-1])))
    listen(kit, handler_of(fails_once(got, RetryLater("1s")), is_async), decrypt)

    kit.handle("aet", span="1s")

    assert got == ["tea", "tea"]


@both_kinds
def test_a_message_is_dropped_by_a_middleware_that_ends_without_yield(kit: Kit, is_async: bool) -> None:
    """It counts as done and is not delivered again."""
    got: list[str] = []
    seen: list[bytes] = []
    only_tea = Around(lambda delivery: seen.append(delivery.message.body) or (delivery if seen[-1] == b"tea" else None))
    listen(kit, handler_of(got.append, is_async), only_tea)

    kit.handle("cup", "tea", span="3h")

    assert (sorted(seen), got) == ([b"cup", b"tea"], ["tea"])


@both_kinds
@pytest.mark.parametrize("dropping", [Around(lambda delivery: delivery.filter(lambda _: False)), AsyncRetriesOnly()])
def test_a_message_that_is_filtered_out_is_dropped(kit: Kit, is_async: bool, dropping: object) -> None:
    """An async middleware may drop one, too."""
    got: list[str] = []
    listen(kit, handler_of(got.append, is_async), dropping)

    kit.handle("tea", span="3h")

    assert got == []


@both_kinds
def test_a_middleware_may_suppress_an_exception(kit: Kit, is_async: bool) -> None:
    """The message is done then: without a retry and without a failure."""
    calls: list[str] = []
    listen(kit, handler_of(lambda order: calls.append(order) or fail(order), is_async), Lenient())

    kit.handle("tea", span="3h")

    assert calls == ["tea"]


@both_kinds
def test_a_middleware_replaces_the_reply_or_replies_itself(kit: Kit, is_async: bool) -> None:
    """Of a request; the handler is not called if the middleware does not yield."""

    class Cache:
        def consume(self, delivery: Delivery) -> Consuming:
            if delivery.message.body == b"cup":
                return "from the cache"
            return f"{(yield delivery)}!"

    listen(kit, handler_of(lambda article: f"{article} is 320", is_async), Cache())

    assert kit.template.send_and_receive("orders", "tea", str) == "tea is 320!"
    assert kit.template.send_and_receive("orders", "cup", str) == "from the cache"


@FAILURES
def test_a_middleware_that_raises_fails_the_message(kit: Kit) -> None:
    got: list[str] = []
    calls: list[int] = []

    def fail_first(delivery: Delivery) -> Delivery:
        calls.append(delivery.attempt)
        if delivery.attempt == 1:
            raise OSError("no audit")
        return delivery

    listen(kit, handler_of(got.append, False), Around(fail_first), retry=["1s"])
    kit.handle("tea", span="1s")

    assert (calls, got) == ([1, 2], ["tea"])


@both_kinds
@FAILURES
def test_the_stack_of_a_dead_letter_has_the_users_code(kit: Kit, is_async: bool) -> None:
    """The middlewares of the user are in it, and what drives them is not."""
    listen(kit, handler_of(fail, is_async), Timing(), Noting([], "outer"), max_reconsume_times=0)

    kit.handle("tea")

    [letter] = kit.harness.assert_dead_lettered("billing")
    stack = letter.properties["dead_letter_stack"]
    assert "in consume" in stack
    assert stack.endswith("KeyError: 'tea'")
    assert str(Path(mqtemplate.__file__).parent) not in stack


@both_kinds
@pytest.mark.parametrize("twice", [Twice(), TwiceAsync()])
@FAILURES
def test_a_second_yield_is_an_error(kit: Kit, is_async: bool, twice: object) -> None:
    listen(kit, handler_of(str, is_async), twice, retry_for=(OSError,))

    kit.handle("tea")

    [failure] = kit.harness.failures
    assert "consume yielded twice; " in str(failure.error)


# --- batches and ordered listeners ----------------------------------------------------------------


def batch_handler_of(handle: Callable[[list[str]], Any], is_async: bool) -> Callable[..., Any]:
    def plain(orders: list[str]) -> list[int] | None:
        return handle(orders)

    async def awaiting(orders: list[str]) -> list[int] | None:
        return handle(orders)

    return awaiting if is_async else plain


def without_salt(delivery: Delivery) -> Delivery:
    """Filter a message out, and change the others."""
    kept = delivery.filter(lambda each: each.body != b"salt")
    return kept.map(lambda each: replace(each, body=each.body.upper()))


@both_kinds
@pytest.mark.parametrize("raises", [False, True])
@FAILURES
def test_indices_of_a_filtered_batch_mean_the_messages_that_the_handler_got(
    kit: Kit, is_async: bool, raises: bool
) -> None:
    """The batch passes once. Only the failed message is delivered again, as it was fetched; the others are done."""
    got: list[list[str]] = []

    def fail_last(orders: list[str]) -> list[int]:
        got.append(orders)
        if raises and len(orders) > 1:
            raise BatchFailure([1])
        return [1][: len(orders) - 1]

    listen(kit, batch_handler_of(fail_last, is_async), Around(without_salt), retry=["1s"])
    kit.handle(["salt", "tea", "cup"], span="3h")

    assert got == [["TEA", "CUP"], ["CUP"]]


@FAILURES
def test_a_middleware_may_fail_some_messages_of_a_batch(kit: Kit) -> None:
    """Its indices count the messages that it got. An invalid body still fails alone."""
    got: list[list[int]] = []

    class Strict:
        def consume(self, delivery: Delivery) -> Consuming:
            yield delivery
            if len(delivery.messages) == 3:
                raise BatchFailure([0])

    def handle(orders: list[int]) -> None:
        got.append(orders)

    listen(kit, handle, Strict(), retry=["1s"])
    kit.handle([b"1", b"2", b"no number"], span="3h")

    assert got == [[1, 2], [1]]
    kit.harness.assert_dead_lettered("billing", times=1)


@FAILURES
def test_the_order_of_a_queue_stays_while_a_middleware_fails_and_drops(kit: Kit) -> None:
    got: list[str] = []
    attempts: list[tuple[bytes, int]] = []

    def gate(delivery: Delivery) -> Delivery | None:
        attempts.append((delivery.message.body, delivery.attempt))
        if attempts[-1] == (b"b", 1):
            raise OSError("try again")
        return delivery if delivery.message.body != b"c" else None

    listen(kit, handler_of(got.append, False), Around(gate), consume_mode=ConsumeMode.ORDERLY)
    for body in ("a", "b", "c", "d"):
        kit.template.sync_send("orders", body, hash_key="one")
    kit.harness.advance("1m")

    assert got == ["a", "b", "d"]
    assert attempts == [(b"a", 1), (b"b", 1), (b"b", 2), (b"c", 1), (b"d", 1)]


@FAILURES
def test_a_requested_redelivery_is_a_result(kit: Kit) -> None:
    results: list[tuple[object, bool]] = []

    class Results:
        def consume(self, delivery: Delivery) -> Consuming:
            result = yield delivery
            results.append((result, delivery.listener.is_done(result)))

    def handle(order: str, message: MessageExt) -> ConsumeStatus | None:
        return None if message.reconsume_times else ConsumeStatus.RECONSUME_LATER

    listen(kit, handle, Results(), retry=["1s"])
    kit.handle("tea", span="1s")

    assert results == [(ConsumeStatus.RECONSUME_LATER, False), (None, True)]


# --- registration ---------------------------------------------------------------------------------

ORDER: list[str] = []
QUIET = message_listener("orders", "billing")(handler_of(lambda order: None, False))


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

    kit.handle("tea")

    assert ORDER == ["First", "Configured", "Second", "OfListener", "Configured", "tea"]


def test_middlewares_of_the_library_can_be_configured_by_name(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """With the defaults of their arguments."""
    names = "mqtemplate.Timing, mqtemplate.Deduplication, mqtemplate.CircuitBreaker"
    kit.start(QUIET, settings={"mqtemplate.middlewares": names})
    kit.handle("tea")

    assert "message.handled" in caplog.text


def test_a_function_or_an_object_can_be_marked(kit: Kit) -> None:
    events: list[Any] = []

    @middleware(order=5)
    def inner() -> Noting:
        return Noting(events, "inner")

    kit.start(QUIET, inner, middleware(Configured()))
    ORDER.clear()
    kit.handle("tea")

    assert (ORDER, events) == (["Configured"], ["inner before", "inner after None"])


@both_kinds
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
    with pytest.raises(ListenerError, match=text):
        mqtemplate_app(message_listener("orders", "billing", middlewares=[given])(handler_of(str, False)))


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
