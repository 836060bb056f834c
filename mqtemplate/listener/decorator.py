"""``@message_listener``: it notes what a class or function wants to hear, and does nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mqtemplate.broker import ConsumeFromWhere, MessageModel
from mqtemplate.errors import ListenerError
from mqtemplate.listener.modes import ConsumeMode
from mqtemplate.selectors.tags import SelectorType

LISTENER_ATTRIBUTE = "__mqtemplate_listener__"
"""Where a decorated object keeps its tuple of `ListenerSpec`."""

_Target = TypeVar("_Target", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSpec:
    """The attributes of one ``@message_listener``, as written: placeholders are still placeholders.

    Each text may hold ``${key:default}``, and each number or choice may be such a text; `resolution.resolve_spec`
    fills them in when the application starts. What an attribute does, and where:

    Which messages (`Consumer`):
        topics: One or several. consumer_group: Who shares the work and the progress.
        selector_type, selector_expression: ``TAG`` and tags joined by two bars, ``*`` for all; or ``SQL92`` and a
            condition over the messages' properties.
        message_model: Share the messages out in the group, or each member gets all (then failures are not retried).
        instance_name: In a broadcasting group, whose progress to go on with.
        consume_from_where, consume_timestamp: Where a group starts in a queue that it never read; the timestamp is
            epoch milliseconds or ``yyyyMMddHHmmss`` of the local time, half an hour ago if not given.

    How they are fetched (`ListenerContainer`):
        pull_batch_size: At most so many messages a fetch. pull_interval: Milliseconds between two fetches.

    How they are handled (`WorkerPool`, `Concurrently`, `Orderly`):
        consume_mode: ``CONCURRENTLY`` or ``ORDERLY``.
        consume_thread_number: Handlers that run at the same time, at most.
        consume_thread_max: The ceiling of threads. Above *consume_thread_number* a thread is started only to
            replace one that hangs in a handler for longer than *consume_timeout*.
        consume_timeout: Minutes. Concurrent messages that a handler keeps for longer are sent back.
        consume_message_batch_max_size: Messages a thread takes at a time. A batch handler (``list[T]``) gets them in
            one call, and 1 means *pull_batch_size* there; any other handler is called for one after the other.
        reply_timeout: Milliseconds for bringing a reply back. A handler of single messages that returns a value
            replies with it to a message that was sent by ``send_and_receive``.
        batch: Whether a ``list[...]`` payload means several messages (True) or one message whose body is a JSON
            list (False). None: several, if the annotation names the type of the items.

    What happens to those that fail (`Concurrently`, `Orderly`):
        max_reconsume_times: Retries before the dead letter topic; -1 is 16, and for ever when orderly.
        delay_level_when_next_consume: 0 the broker's ladder, above 0 always this level, -1 dead letter at once.
        suspend_current_queue_time_millis: Pause before an orderly queue tries again, 10 to 30,000.

    Start and stop (`ListenerRegistry`, `ListenerContainer`):
        id: The name in logs and errors; by default that of the class or function.
        enabled: False leaves the listener out. auto_startup: False waits for a ``start()`` of its container.
        await_termination_millis_when_shutdown: How long a stop waits for handlers that run.

    Refused with a reason where they cannot be honoured (`unsupported.check_supported`):
        access_key, secret_key, tls_enable, namespace and namespace_v2 by the embedded broker; on a cluster they are
        the application's, and a listener may only say the same. enable_msg_trace, customized_trace_topic and
        access_channel by both, as is a name_server other than the application's own.
    """

    topics: tuple[str, ...]
    consumer_group: str
    selector_type: SelectorType | str = SelectorType.TAG
    selector_expression: str = "*"
    consume_mode: ConsumeMode | str = ConsumeMode.CONCURRENTLY
    message_model: MessageModel | str = MessageModel.CLUSTERING
    consume_thread_max: int | str = 64
    consume_thread_number: int | str = 20
    max_reconsume_times: int | str = -1
    consume_timeout: int | str = 15
    reply_timeout: int | str = 3_000
    access_key: str = "${rocketmq.consumer.access-key:}"
    secret_key: str = "${rocketmq.consumer.secret-key:}"
    enable_msg_trace: bool | str = False
    customized_trace_topic: str = "${rocketmq.consumer.customized-trace-topic:}"
    name_server: str = "${rocketmq.name-server:}"
    access_channel: str = "${rocketmq.access-channel:}"
    tls_enable: bool | str = "false"
    namespace: str = ""
    namespace_v2: str = ""
    delay_level_when_next_consume: int | str = 0
    suspend_current_queue_time_millis: int | str = 1_000
    await_termination_millis_when_shutdown: int | str = 1_000
    instance_name: str = "DEFAULT"
    pull_interval: int | str = 0
    pull_batch_size: int | str = 32
    consume_message_batch_max_size: int | str = 1
    consume_from_where: ConsumeFromWhere | str = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    consume_timestamp: int | str = ""
    batch: bool | None = None
    enabled: bool | str = True
    auto_startup: bool | str = True
    id: str = ""


def message_listener(  # one parameter for each attribute that people know from Spring
    topic: str | Sequence[str],
    consumer_group: str,
    *,
    selector_type: SelectorType | str = SelectorType.TAG,
    selector_expression: str = "*",
    consume_mode: ConsumeMode | str = ConsumeMode.CONCURRENTLY,
    message_model: MessageModel | str = MessageModel.CLUSTERING,
    consume_thread_max: int | str = 64,
    consume_thread_number: int | str = 20,
    max_reconsume_times: int | str = -1,
    consume_timeout: int | str = 15,
    reply_timeout: int | str = 3_000,
    access_key: str = "${rocketmq.consumer.access-key:}",
    secret_key: str = "${rocketmq.consumer.secret-key:}",
    enable_msg_trace: bool | str = False,
    customized_trace_topic: str = "${rocketmq.consumer.customized-trace-topic:}",
    name_server: str = "${rocketmq.name-server:}",
    access_channel: str = "${rocketmq.access-channel:}",
    tls_enable: bool | str = "false",
    namespace: str = "",
    namespace_v2: str = "",
    delay_level_when_next_consume: int | str = 0,
    suspend_current_queue_time_millis: int | str = 1_000,
    await_termination_millis_when_shutdown: int | str = 1_000,
    instance_name: str = "DEFAULT",
    pull_interval: int | str = 0,
    pull_batch_size: int | str = 32,
    consume_message_batch_max_size: int | str = 1,
    consume_from_where: ConsumeFromWhere | str = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
    consume_timestamp: int | str = "",
    batch: bool | None = None,
    enabled: bool | str = True,
    auto_startup: bool | str = True,
    id: str = "",  # noqa: A002 (the attribute's name; nothing here needs the builtin)
) -> Callable[[_Target], _Target]:
    """Make a class with ``on_message``, or a function, hear a topic's messages; `ListenerSpec` tells each attribute.

    The object is returned unchanged: a test calls it like any other. Several decorators on one object are several
    listeners. The first parameter of the handler is the payload, converted to the type it is annotated with.

    Raises:
        ListenerError: The object cannot be a listener.
    """
    attributes: dict[str, Any] = dict(locals())
    attributes["topics"] = _topics(attributes.pop("topic"))
    spec = ListenerSpec(**attributes)

    def note(target: _Target) -> _Target:
        _check_target(target)
        # The lowest decorator runs first; readers expect the order they see.
        setattr(target, LISTENER_ATTRIBUTE, (spec, *listener_specs(target)))
        return target

    return note


def listener_specs(target: object) -> tuple[ListenerSpec, ...]:
    """What the decorators noted on this very class or function; what a base class noted is that class's own."""
    noted: tuple[ListenerSpec, ...] = getattr(target, "__dict__", {}).get(LISTENER_ATTRIBUTE, ())
    return noted


def _topics(topic: str | Sequence[Any]) -> tuple[str, ...]:
    topics = (topic,) if isinstance(topic, str) else tuple(topic)
    if not topics or not all(isinstance(name, str) and name.strip() for name in topics):
        raise ListenerError(f"@message_listener: topic must be a name or a list of names, got {topic!r}")
    if len(set(topics)) < len(topics):
        raise ListenerError(f"@message_listener: topic {list(topics)!r} names one topic twice; name each once")
    return topics


def _check_target(target: object) -> None:
    name = getattr(target, "__qualname__", repr(target))
    if inspect.isclass(getattr(target, "__wrapped__", None)):
        raise ListenerError(
            f"@message_listener: {name} is a class that @inject turned into a function; "
            "remove @inject from the class: the application injects its constructor by the types it names "
            "(or put @inject on __init__)"
        )
    if inspect.isclass(target):
        if not callable(getattr(target, "on_message", None)):
            raise ListenerError(
                f"@message_listener: class {name} has no method on_message; write "
                "'def on_message(self, message: str) -> None: ...' with the type the payload shall have"
            )
    elif not callable(target):
        raise ListenerError(
            f"@message_listener: {name} cannot be called; decorate a function, or a class with on_message"
        )
