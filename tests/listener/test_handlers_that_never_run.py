"""Handlers whose call runs nothing: they are refused at the decorator, and their messages are never acknowledged."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mqtemplate import TransactionState, message_listener, on_tag, publishes, scheduled
from mqtemplate.errors import ConfigurationError, ListenerError, MQTemplateError, ScheduleError
from mqtemplate.listener.declaration.decorator import LISTENER_ATTRIBUTE
from mqtemplate.template.transactions import transaction_listener
from mqtemplate.testing import Harness, messages_in
from tests.kit import application

pytestmark = pytest.mark.feature("listeners")


def yields(message: str) -> Iterator[str]:
    yield message


async def yields_async(message: str) -> AsyncIterator[str]:
    yield message


@functools.wraps(yields)
def wraps_a_generator(message: str) -> Any:
    return yields(message)


class Yields:
    def on_message(self, message: str) -> Iterator[str]:
        yield message


class YieldsWhenCalled:
    def __call__(self, message: str) -> Iterator[str]:
        yield message


class YieldsStatically:
    @staticmethod
    def on_message(message: str) -> Iterator[str]:
        yield message


class Inherits(Yields):
    pass


@pytest.mark.parametrize(
    "target",
    [
        yields,
        yields_async,
        wraps_a_generator,
        contextmanager(yields),
        functools.partial(yields),
        Yields,
        YieldsWhenCalled(),
        YieldsStatically,
        Inherits,
    ],
    ids=lambda handler: re.sub(" at 0x[0-9a-f]+", "", str(handler)),
)
def test_a_handler_with_yield_is_refused_at_the_decorator(target: Callable[..., object]) -> None:
    """A call of it would run nothing, and its message would be acknowledged."""
    with pytest.raises(
        ListenerError, match="has a 'yield', so it is an? (async )?generator: a call of it runs nothing"
    ):
        message_listener("orders", "billing")(target)


def test_the_other_decorators_and_hooks_refuse_it_too() -> None:
    with pytest.raises(ListenerError, match="@on_tag: yields has a 'yield'"):
        on_tag("paid")(yields)
    with pytest.raises(ScheduleError, match="@scheduled: yields has a 'yield'"):
        scheduled(every="1m")(yields)
    with pytest.raises(ListenerError, match="execute_local_transaction has a 'yield'"):

        @transaction_listener()
        class Transactions:
            def execute_local_transaction(self, message: object, arg: object) -> Iterator[TransactionState]:
                yield TransactionState.COMMIT

            def check_local_transaction(self, message: object) -> TransactionState:
                return TransactionState.COMMIT

    def on_error(error: BaseException, message: object) -> Iterator[None]:
        yield

    @message_listener("orders", "billing", error_handler=on_error)
    def bill(order: str) -> None: ...

    with pytest.raises(ListenerError, match="error_handler .* has a 'yield'"):
        application(bill).start()


def test_a_method_that_replaces_the_checked_one_is_refused_at_the_start() -> None:
    class Bill:
        def on_message(self, order: str) -> None: ...

    message_listener("orders", "billing")(Bill)
    Bill.on_message = Yields.on_message  # type: ignore[method-assign, assignment]

    with pytest.raises(ListenerError, match="the handler has a 'yield'"):
        application(Bill).start()


def test_a_generator_that_is_awaited_is_no_generator() -> None:
    """The old form of coroutines."""

    @types.coroutine
    def old(message: str) -> Generator[Any, Any, None]:
        yield

    assert hasattr(message_listener("orders", "billing")(old), LISTENER_ATTRIBUTE)


async def work() -> None: ...


def numbers() -> Iterator[int]:
    yield 1


async def numbers_async() -> AsyncIterator[int]:
    yield 1


def returns_a_generator(message: str) -> object:
    return numbers()


def returns_an_async_generator(message: str) -> object:
    return numbers_async()


def returns_a_map(message: str) -> object:
    return map(print, [message])


def returns_coroutines(message: str) -> object:
    return [work(), work()]


async def forgets_to_await(message: str) -> object:
    return work()


async def returns_a_generator_later(message: str) -> object:
    return numbers()


def takes_batches(messages: list[str]) -> object:
    return numbers()


async def forgets_to_await_a_batch(messages: list[str]) -> object:
    return work()


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        (returns_a_generator, "a generator that nothing runs"),
        (returns_an_async_generator, "a async_generator that nothing runs"),
        (returns_a_map, "a map that nothing runs"),
        (returns_coroutines, "a coroutine that nothing awaits"),
        (forgets_to_await, "a coroutine that nothing awaits"),
        (returns_a_generator_later, "a generator that nothing runs"),
        (takes_batches, "a generator that nothing runs"),
        (forgets_to_await_a_batch, "a coroutine that nothing awaits"),
        (publishes("receipts")(functools.wraps(returns_a_generator)(lambda message: numbers())), "a generator that"),
    ],
)
@pytest.mark.parametrize("mode", ["CONCURRENTLY", "ORDERLY"])
def test_a_result_that_nobody_runs_is_a_failure(handler: Callable[..., object], found: str, mode: str) -> None:
    """The message is retried and then a dead letter with the reason; it is not acknowledged."""
    function = types.FunctionType(handler.__code__, handler.__globals__, handler.__name__, closure=handler.__closure__)
    function.__annotations__ = handler.__annotations__
    function.__dict__.update({k: v for k, v in vars(handler).items() if k.startswith("__mqtemplate")})
    listener = message_listener("orders", "billing", consume_mode=mode, retry=["1s"])(function)
    with application(listener) as app:
        app.template.sync_send("orders", "tea")
        Harness(app, raise_handler_errors=False).advance("1m")

        [dead] = messages_in(app.broker, "%DLQ%billing")
        assert found in str(dead.properties)


def test_a_plain_handler_may_return_a_coroutine_which_is_run() -> None:
    done: list[str] = []

    async def finish(message: str) -> None:
        done.append(message)

    @message_listener("orders", "billing")
    def bill(order: str) -> object:
        return finish(order)

    with application(bill) as app:
        app.template.sync_send("orders", "tea")
        Harness(app).run_until_idle()

    assert done == ["tea"]


def test_a_scheduled_function_that_returns_a_generator_fails(caplog: pytest.LogCaptureFixture) -> None:
    @scheduled(every="1m", retry=["1s"])
    def tidy() -> object:
        return numbers()

    with application(tidy) as app:
        Harness(app, raise_handler_errors=False).advance("2m")

    assert "the handler returned a generator that nothing runs, so its work is not done" in caplog.text


def test_a_callback_that_is_never_awaited_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def report(result: object) -> None: ...

    with application() as app:
        app.template.async_send("orders", "tea", on_success=report).result()

    assert "returned a coroutine that nothing awaits, so it did nothing; write it with 'def'" in caplog.text


def test_a_hook_with_yield_is_an_error_of_the_start() -> None:
    class Cache:
        def on_start(self) -> Iterator[None]:
            yield

    with pytest.raises((ConfigurationError, MQTemplateError, ExceptionGroup), match="on_start returned a generator"):
        application(Cache()).start()
