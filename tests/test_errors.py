"""Errors: they can be copied and pickled, and their texts can be printed, whatever a caller gave."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import multiprocessing
import pickle
import pkgutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from typing import Any

import pytest

import mqtemplate
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.errors import (
    DeletedRecordError,
    MessageError,
    RemoteConnectError,
    SelectorError,
    SendError,
    SendTimeoutError,
)
from mqtemplate.listener.failures.failure import BatchFailure, DeadLetter, RetryLater
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, PackedBody
from mqtemplate.operations.changes import ChangePreview
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.results import SendResult, SendStatus, TransactionSendResult
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.user_code import did_you_mean, shown

_ARGUMENTS: dict[str, object] = {
    # parameter of a constructor -> a value
    "message": "a text",
    "next_offset": 7,
    "key": "cart-17",
    "topic": "reminders",
    "handle": "djEg",
    "msg_id": "7F0000010001",
    "deliver_ms": 1_700_000_000_000,
    "was_sent": True,
    "path": "/data/commitlog/0",
    "physical_offset": 11,
    "reason": "a cause",
    "log_start": 64,
    "expression": "a = ",
    "at": 3,
    "code": ResponseCode.SYSTEM_ERROR,
    "remark": "a text",
    "delay": "10s",
    "duration": "1m",
    "failed": (1, 2),
    "text": "a text",
    "keys": "a-key",
    "status": 400,
    "stream_id": 5,
    "header": None,
    "preview": ChangePreview(count=3, noun="pending message", topics={"orders": 3}),
}


def _error_classes() -> list[type[Exception]]:
    """Return each exception class that a module of the package defines."""
    for module in pkgutil.walk_packages(mqtemplate.__path__, "mqtemplate."):
        if not module.name.endswith("__main__") and ".django" not in module.name:
            importlib.import_module(module.name)

    def below(kind: type[Exception]) -> Iterator[type[Exception]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    found = {each for each in below(Exception) if each.__module__.startswith("mqtemplate.")}
    found = {each for each in found if not each.__name__.startswith("_")}  # those stay in their module
    return sorted(found, key=lambda each: (each.__module__, each.__qualname__))


def _new(kind: type[Exception]) -> Exception:
    """Create an error by its real constructor."""
    parameters = inspect.signature(kind.__init__).parameters.values() if "__init__" in _own_members(kind) else []
    given = [each for each in parameters if each.name != "self"]
    if not given:
        return kind("a text")
    positional = [_ARGUMENTS[each.name] for each in given if each.kind is not each.KEYWORD_ONLY]
    return kind(*positional, **{each.name: _ARGUMENTS[each.name] for each in given if each.kind is each.KEYWORD_ONLY})


def _own_members(kind: type[Exception]) -> set[str]:
    return {name for each in kind.__mro__ if each.__module__ != "builtins" for name in vars(each)}


def _facts(error: BaseException) -> tuple[object, ...]:
    return type(error), str(error), error.args, vars(error)


def test_each_error_survives_copies_and_pickles() -> None:
    """A `multiprocessing.Pool` hangs on an error that cannot be unpickled, and tools copy errors to change them.

    The constructor of many errors takes other values than the text, and Python rebuilds an exception from the text.
    """
    classes = _error_classes()
    assert len(classes) > 40

    for kind in classes:
        error = _new(kind)
        error.add_note("a note")

        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert _facts(twin) == _facts(error), kind


def test_an_error_of_a_user_with_a_constructor_of_its_own_survives_too() -> None:
    error = _OrderError(order=12, customer="c")
    error.source = "/srv/shop.py, line 3"

    twin = pickle.loads(pickle.dumps(error))

    assert _facts(twin) == _facts(error)
    assert (twin.order, twin.customer, twin.source) == (12, "c", "/srv/shop.py, line 3")


class _OrderError(MessageError):
    def __init__(self, *, order: int, customer: str) -> None:
        super().__init__(f"order {order} of {customer}")
        self.order, self.customer = order, customer


def _raise(number: int) -> None:
    if number == 0:
        Sql92Selector("price >")
    if number == 1:
        raise DeletedRecordError("/data/0", 11, 64)
    raise RetryLater("10s", "busy")


def test_pools_of_processes_return_errors() -> None:
    """The error arrives as it was raised: type, text and attributes."""
    spawned = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        errors = [pool.submit(_raise, number).exception(timeout=60) for number in range(3)]

    selector, deleted, later = errors
    assert isinstance(selector, SelectorError)
    assert (selector.expression, selector.column) == ("price >", 8)
    assert isinstance(deleted, DeletedRecordError)
    assert deleted.log_start == 64
    assert isinstance(later, RetryLater)
    assert later.delay_ms == 10_000


def test_values_of_the_public_api_survive_copies_and_pickles() -> None:
    """Applications store results, and pass messages to other processes."""
    queue = MessageQueue("orders", "b", 1)
    message = MessageExt(
        topic="orders",
        body=PackedBody(b"x", "not zlib"),
        properties={"TAGS": "a"},
        broker_name="b",
        queue_id=1,
        queue_offset=2,
        physical_offset=3,
        store_size=4,
        sys_flag=0,
        body_crc=5,
        born_timestamp=6,
        born_host=HostAddress("127.0.0.1", 1),
        store_timestamp=7,
        store_host=HostAddress("127.0.0.1", 2),
        reconsume_times=0,
        prepared_transaction_offset=0,
    )
    result = SendResult(SendStatus.SEND_OK, "id", "offset id", queue, 4, handle="h")
    values: list[Any] = [
        message,
        Message("orders", b"x", {"KEYS": "k"}),
        queue,
        result,
        TransactionSendResult(SendStatus.SEND_OK, "id", "offset id", queue, 4),
        TagSelector("a || b"),
        Sql92Selector("a = 'b'"),
    ]

    for value in values:
        for twin in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
            assert type(twin) is type(value)
            assert twin == value
    assert pickle.loads(pickle.dumps(message)).body.reason == "not zlib"


def test_the_text_of_an_error_can_be_printed_everywhere() -> None:
    """A lone surrogate ends the `print` or the log line that should report it; an escape changes the terminal."""
    error = MessageError("topic \udcff, \x1b[2J, \x00\r and a\n\tsecond line, prix élevé")

    assert str(error) == "topic \\udcff, \\x1b[2J, \\x00\\r and a\n\tsecond line, prix élevé"
    io.TextIOWrapper(io.BytesIO(), encoding="utf-8").write(str(error))


def test_the_text_of_an_error_has_a_bound() -> None:
    text = str(MessageError("x" * 1_000_000))

    assert len(text) < 21_000
    assert text.endswith("… (980,000 characters more)")


class _Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (10**5_000, "a number of 16,610 bits"),
        (-(10**5_000), "a negative number of 16,610 bits"),
        (_Hostile(), "<unprintable _Hostile>"),
        (Fraction(10**5_000), "<unprintable Fraction>"),
        ("x" * 10_000_000, f"'{'x' * 199}…"),
        ([1] * 1_000, f"{str([1] * 1_000)[:200]}…"),
    ],
    ids=["text", "digits", "negative", "repr", "fraction", "long", "list"],
)
def test_a_given_value_is_shown_whatever_it_is(value: object, text: str) -> None:
    """Python writes no number of more than 4,300 digits, so the report of a bad number could fail itself."""
    assert shown(value) == text


def test_errors_with_facts_say_the_same_after_a_pickle() -> None:
    """The facts beside the text decide what the caller does next."""
    away = SendError("the queue is away")
    away.queue_is_away, away.tries = True, ("a", "b")
    lost = RemoteConnectError("lost", was_sent=True)

    again = pickle.loads(pickle.dumps(away))
    assert (again.queue_is_away, again.tries) == (True, ("a", "b"))
    assert pickle.loads(pickle.dumps(lost)).was_sent
    assert isinstance(pickle.loads(pickle.dumps(SendTimeoutError("late"))), TimeoutError)
    for request in (RetryLater("10s"), DeadLetter("bad"), PauseListener("1m"), BatchFailure([3])):
        assert _facts(copy.copy(request)) == _facts(request)


@pytest.mark.parametrize(
    ("name", "written", "hint"),
    [
        ("ordrs", None, "did you mean 'orders'?"),
        ("ordrs", {"orders": "Orders", "payments": "Payments"}, "did you mean 'Orders'?"),
        ("xyz", None, "there is: orders, payments"),
    ],
)
def test_a_hint_names_the_nearest_known_name_or_says_something_else(
    name: str, written: dict[str, str] | None, hint: str
) -> None:
    assert did_you_mean(name, ["orders", "payments"], "there is: orders, payments", written=written) == hint


def test_the_hint_is_never_the_given_name_itself() -> None:
    """A name that was missing a moment ago may exist by now; other spellings of a known name are a hint."""
    assert did_you_mean("orders", ["orders"], "there is: orders") == "there is: orders"
    assert did_you_mean("orders", ["orders", "orders2"]) == "did you mean 'orders2'?"
    assert did_you_mean("orders", ["orders"], written={"orders": "Orders"}) == "did you mean 'Orders'?"


def test_the_error_of_an_operation_becomes_the_error_of_each_of_its_parts() -> None:
    """Each is another object of the same class: several threads may raise them. A text in the reason stays as it is."""
    cause = OSError("connection reset")
    error = SendTimeoutError.during("send a batch", "tried twice: send a batch timed out")
    error.tries, error.__cause__ = ("(1-2)",), cause

    part = error.of_part("send message 1")

    assert (str(part), part.operation) == ("send message 1: tried twice: send a batch timed out", "send message 1")
    assert (type(part), part.tries, part.__cause__) == (SendTimeoutError, ("(1-2)",), cause)
    assert str(error) == "send a batch: tried twice: send a batch timed out"


def test_an_error_without_an_operation_is_the_same_for_each_part() -> None:
    error = RemoteConnectError("no connection to 10.0.0.1:10911", was_sent=True)

    part = error.of_part("send message 1")

    assert part is not error
    assert (str(part), part.operation, part.was_sent) == (str(error), "", True)
