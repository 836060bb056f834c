"""Parameters of handlers from the application: objects by type, and values that are made for one call."""

from asyncio import sleep as virtual_sleep
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from mqtemplate import Depends, MessageExt, RocketMQTemplate, Section, Value, message_listener, service
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import ListenerError
from mqtemplate.listener import ListenerRegistry
from mqtemplate.testing import Harness
from mqtemplate.testing.harness import StartApp
from tests.kit import Kit

EVENTS: list[Any] = []


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


@service
class Audit:
    name = "audit"


@service
class Engine:
    def __init__(self, audit: Audit) -> None:
        self.audit = audit


@dataclass
class Session:
    """A database session: opened for one message."""

    engine: Engine
    number: int


class ShopSettings(BaseModel):
    limit: int = 0


def open_session(engine: Engine) -> Iterator[Session]:
    session = Session(engine, sum(event == "open" for event in EVENTS) + 1)
    EVENTS.append("open")
    try:
        yield session
    except Exception as error:
        EVENTS.append(f"rollback {type(error).__name__}")
        raise
    else:
        EVENTS.append("commit")
    finally:
        EVENTS.append("close")


async def open_async_session(engine: Engine) -> AsyncIterator[Session]:
    await virtual_sleep(0)
    EVENTS.append("open")
    try:
        yield Session(engine, 1)
    except Exception as error:
        await virtual_sleep(0)
        EVENTS.append(f"rollback {type(error).__name__}")
        raise
    await virtual_sleep(0)
    EVENTS.append("commit")


DbSession = Annotated[Session, Depends(open_session)]
AsyncDbSession = Annotated[Session, Depends(open_async_session)]


class Repository:
    """Built for each message, with a value of another provider."""

    def __init__(self, session: DbSession, message: MessageExt) -> None:
        self.session = session
        self.key = message.keys


async def tenant(message: MessageExt) -> str:
    await virtual_sleep(0)
    return message.user_properties["tenant"]


def run(kit: Kit, handler: Any, *components: object) -> None:
    """Start a listener of ``orders`` and send it one message."""
    kit.start(handler, Audit, Engine, *components, settings={"shop": {"limit": 3}})
    kit.template.sync_send("orders", "tea", keys="4466", headers={"tenant": "acme"})
    kit.harness.run_until_idle()


# --- objects of the application -------------------------------------------------------------------


def test_a_handler_takes_objects_of_the_application_by_type(kit: Kit) -> None:
    """Beside the values of the message, in any order; a value of the configuration by its annotation."""

    @message_listener("orders", "billing")
    def handle(
        order: str,
        audit: Audit,
        message: MessageExt,
        audits: Sequence[Audit],
        template: RocketMQTemplate,
        limit: Annotated[int, Value("${shop.limit}")],
        shop: Annotated[ShopSettings, Section("shop")],
        factor: int = 2,
    ) -> None:
        EVENTS.append((order, audit.name, message.keys, len(audits), template, limit, shop.limit, factor))

    run(kit, handle)

    assert [("tea", "audit", "4466", 1, kit.template, 3, 3, 2)] == EVENTS


def test_a_method_and_an_async_batch_handler_take_objects(kit: Kit) -> None:
    @message_listener("orders", "billing")
    class Billing:
        def __init__(self, engine: Engine) -> None:
            self.engine = engine

        def on_message(self, order: str, audit: Audit) -> None:
            EVENTS.append(self.engine.audit is audit)

    @message_listener("orders", "batches")
    async def handle(orders: list[str], headers: list[dict[str, str]], audit: Audit) -> None:
        EVENTS.append((orders, headers[0]["tenant"], audit.name))

    run(kit, Billing, handle)

    assert EVENTS == [True, (["tea"], "acme", "audit")]


# --- values of one call ---------------------------------------------------------------------------


def test_a_provider_is_opened_before_the_handler_and_closed_after_it(kit: Kit) -> None:
    """Once for each message, also if another provider uses it."""

    @message_listener("orders", "billing")
    def handle(order: str, repository: Annotated[Repository, Depends(Repository)], session: DbSession) -> None:
        EVENTS.append((order, repository.key, repository.session is session, session.engine.audit.name, session.number))

    run(kit, handle)
    kit.handle("cup")

    assert EVENTS == [
        "open",
        ("tea", "4466", True, "audit", 1),
        "commit",
        "close",
        "open",
        ("cup", None, True, "audit", 2),
        "commit",
        "close",
    ]


@pytest.mark.parametrize("is_async", [False, True], ids=["plain provider", "async provider"])
def test_an_async_handler_takes_providers_of_all_kinds(is_async: bool, kit: Kit) -> None:
    provider: Callable[..., Any] = open_async_session if is_async else open_session

    @message_listener("orders", "billing")
    async def handle(
        order: str,
        session: Annotated[Session, Depends(provider)],
        owner: Annotated[str, Depends(tenant)],
        repository: Annotated[Repository, Depends(Repository)],
    ) -> None:
        await virtual_sleep(1)
        EVENTS.append((order, owner, session.engine.audit.name, repository.key))

    run(kit, handle)
    kit.harness.advance("1s")

    assert ("tea", "acme", "audit", "4466") in EVENTS
    assert EVENTS[0] == "open"
    assert "commit" in EVENTS


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_provider_sees_the_exception_of_the_handler(is_async: bool, kit: Kit) -> None:
    @message_listener("orders", "billing", max_reconsume_times=0)
    def handle(order: str, session: DbSession) -> None:
        raise KeyError(order)

    @message_listener("orders", "billing", max_reconsume_times=0)
    async def handle_async(order: str, session: AsyncDbSession) -> None:
        raise KeyError(order)

    run(kit, handle_async if is_async else handle)

    assert EVENTS[:2] == ["open", "rollback KeyError"]
    kit.harness.assert_dead_lettered("billing", times=1)


def swallow() -> Iterator[int]:
    try:
        yield 1
    except KeyError:
        EVENTS.append("suppressed")


async def swallow_async() -> AsyncIterator[int]:
    try:
        yield 1
    except KeyError:
        EVENTS.append("suppressed")


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_provider_cannot_suppress_an_exception(kit: Kit) -> None:
    """Else a forgotten ``raise`` in a provider would lose messages."""

    @message_listener("orders", "one", max_reconsume_times=0)
    def handle(order: str, one: Annotated[int, Depends(swallow)]) -> None:
        raise KeyError(order)

    @message_listener("orders", "two", max_reconsume_times=0)
    async def handle_async(order: str, one: Annotated[int, Depends(swallow_async)]) -> None:
        raise KeyError(order)

    run(kit, handle, handle_async)

    assert EVENTS == ["suppressed", "suppressed"]
    assert [type(failure.error) for failure in kit.harness.failures] == [KeyError, KeyError]


def test_a_body_that_cannot_be_read_opens_nothing(kit: Kit) -> None:
    kit.harness.raise_handler_errors = False

    @message_listener("orders", "billing")
    def handle(order: int, session: DbSession) -> None: ...

    run(kit, handle)

    assert EVENTS == []


def test_a_batch_has_one_scope(kit: Kit) -> None:
    """Its providers take lists of values, as the handler does."""

    def count(messages: list[MessageExt]) -> int:
        return len(messages)

    @message_listener("orders", "billing")
    def handle(orders: list[str], session: DbSession, number: Annotated[int, Depends(count)]) -> None:
        EVENTS.append((orders, number))

    kit.start(handle, Audit, Engine)
    kit.handle(["tea", "cup"])

    assert EVENTS == ["open", (["tea", "cup"], 2), "commit", "close"]


def test_depends_may_be_the_default_as_in_fastapi(kit: Kit) -> None:
    @message_listener("orders", "billing")
    def handle(order: str, session: Session = Depends(open_session)) -> None:  # type: ignore[assignment]  # noqa: B008
        EVENTS.append(session.number)

    run(kit, handle)

    assert EVENTS == ["open", 1, "commit", "close"]


class Numbers:
    """Provider that is an object."""

    def __call__(self, audit: Audit) -> Iterator[int]:
        EVENTS.append("open")
        yield len(audit.name)


def test_a_provider_may_be_an_object_that_is_called(kit: Kit) -> None:
    @message_listener("orders", "billing")
    def handle(order: str, number: Annotated[int, Depends(Numbers())]) -> None:
        EVENTS.append(number)

    run(kit, handle)

    assert EVENTS == ["open", 5]


def test_a_registry_without_an_application_takes_providers(mqtemplate_harness: Harness) -> None:
    def one() -> int:
        return 1

    @message_listener("orders", "billing")
    def handle(order: str, number: Annotated[int, Depends(one)]) -> None:
        EVENTS.append(number)

    registry = ListenerRegistry(mqtemplate_harness.broker, JsonMessageConverter())
    [container] = registry.register(handle)
    mqtemplate_harness.add(container)
    registry.start()
    RocketMQTemplate(mqtemplate_harness.broker).sync_send("orders", "tea")
    mqtemplate_harness.run_until_idle()
    registry.stop()

    assert EVENTS == [1]


# --- what is refused at the start -----------------------------------------------------------------


class Missing: ...


def needs_missing(missing: Missing) -> int:
    return 1


def round_one(value: int) -> int:
    return value


def round_two(value: Annotated[int, Depends(round_one)]) -> int:
    return value


round_one.__annotations__["value"] = Annotated[int, Depends(round_two)]


@contextmanager
def managed() -> Iterator[int]:
    yield 1


def by_type(order: str, missing: Missing) -> None: ...
def by_provider(order: str, value: Annotated[int, Depends(needs_missing)]) -> None: ...
def plain_value(order: str, limit: int) -> None: ...
def async_in_plain(order: str, session: AsyncDbSession) -> None: ...
def in_a_circle(order: str, value: Annotated[int, Depends(round_one)]) -> None: ...
def with_manager(order: str, value: Annotated[int, Depends(managed)]) -> None: ...
def no_function(order: str, value: Annotated[int, Depends("session")]) -> None: ...  # type: ignore[arg-type]
def by_position(order: str, value: Annotated[int, Depends(swallow)], /) -> None: ...
def untyped(order: str, value) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (by_type, "listener .*by_type: by_type: parameter 'missing' needs Missing, and no object here is one"),
        (
            by_provider,
            "by_provider: parameter 'value': provider needs_missing: needs_missing: parameter 'missing' needs Missing",
        ),
        (plain_value, r"plain_value: parameter 'limit' needs a plain int, .*write Annotated\[int, Value"),
        (async_in_plain, "provider open_async_session is async, and the handler is not; write the handler with 'async"),
        (in_a_circle, "these providers need each other: round_one -> round_two -> round_one; break the circle"),
        (with_manager, "managed is wrapped, probably by contextmanager, .*give Depends the function with yield itself"),
        (no_function, "parameter 'value': Depends takes a function, got 'session'"),
        (by_position, "parameter 'value' has the type .* and can only be passed by position"),
        (untyped, r"parameter 'value' has no type; .*objects of the application by their types, and values of func"),
    ],
)
def test_a_parameter_without_a_value_is_refused_at_the_start(
    handler: Callable[..., None], text: str, mqtemplate_app: StartApp
) -> None:
    """The error names the handler and the parameter."""
    with pytest.raises(ListenerError, match=text):
        mqtemplate_app(message_listener("orders", "billing")(handler), Audit, Engine)


def nothing() -> Iterator[int]:
    yield from ()


def twice() -> Iterator[int]:
    yield 1
    yield 2


async def nothing_async() -> AsyncIterator[int]:
    if EVENTS:
        yield 1


async def twice_async() -> AsyncIterator[int]:
    yield 1
    yield 2


@pytest.mark.parametrize("provider", [nothing, nothing_async, twice, twice_async])
def test_a_provider_yields_once(provider: Callable[..., Any], kit: Kit) -> None:
    kit.harness.raise_handler_errors = False

    async def handle(order: str, value: Annotated[int, Depends(provider)]) -> None: ...

    def handle_plain(order: str, value: Annotated[int, Depends(provider)]) -> None: ...

    handler = handle if provider.__name__.endswith("async") else handle_plain
    run(
        kit,
        message_listener("orders", "billing", max_reconsume_times=0)(handler),
    )

    [failure] = kit.harness.failures
    expected = "yielded twice; it yields one value" if "twice" in provider.__name__ else "ended without a yield"
    assert isinstance(failure.error, ListenerError)
    assert expected in str(failure.error)
