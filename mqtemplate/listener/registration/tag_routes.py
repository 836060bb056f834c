"""Plan of a listener class whose methods handle the messages of their tags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mqtemplate.converter import MessageConverter
from mqtemplate.errors import ListenerError
from mqtemplate.listener.calling.parameters import Read
from mqtemplate.listener.endpoint import HandlerPlan
from mqtemplate.listener.failures.outcomes import DeadLetter
from mqtemplate.message import MessageExt


@dataclass(frozen=True, kw_only=True)
class TagRoutedPlan(HandlerPlan):
    """Signatures of the methods of one class, chosen by the tag of the message.

    Attributes:
        routes: Tag -> method.
        other: Method for all other messages; None: such a message goes to the dead letter topic.
    """

    routes: Mapping[str, HandlerPlan]
    other: HandlerPlan | None

    def plans(self) -> Sequence[HandlerPlan]:
        return tuple(self._each())

    def _each(self) -> Iterator[HandlerPlan]:
        yield from self.routes.values()
        if self.other is not None:
            yield self.other

    @cached_property
    def is_async(self) -> bool:
        """True if all methods are ``async def``. If only some are, a consume thread waits for each of their calls."""
        return all(plan.is_async for plan in self.plans())

    @property
    def publishes(self) -> bool:
        return any(plan.publishes for plan in self.plans())

    @property
    def sends_results(self) -> bool:
        return any(plan.sends_results for plan in self.plans())

    def single_call(self, converter: MessageConverter) -> Read:
        """Return a function that calls the method of a message's tag."""
        return self._by_tag(lambda plan: plan.single_call(converter))

    def sending_call(self, converter: MessageConverter) -> Read:
        """Return a function that calls the method of a message's tag, and sends the results of that method."""
        return self._by_tag(lambda plan: plan.sending_call(converter))

    def _by_tag(self, call_of: Callable[[HandlerPlan], Read]) -> Read:
        calls: Mapping[str | None, Read] = {tag: call_of(plan) for tag, plan in self.routes.items()}
        other = _no_method if self.other is None else call_of(self.other)
        return lambda message: calls.get(message.tags, other)(message)


def _no_method(message: MessageExt) -> object:
    raise DeadLetter(f"no method of the listener handles the tag {message.tags!r}; mark one with @on_tag")


def routed_plan(routes: Mapping[str, HandlerPlan], other: HandlerPlan | None, listener: str) -> TagRoutedPlan:
    """Return the plan of a class with tag methods.

    Raises:
        ListenerError: A method takes a batch.
    """
    for tag, plan in routes.items():
        if plan.is_batch:
            raise ListenerError(
                f"{listener}: the method for the tag {tag!r} takes a batch, and a batch may have several tags; take "
                "one message, or write a listener of its own with selector_expression"
            )
    if other is not None and other.is_batch:
        raise ListenerError(f"{listener}: on_message takes a batch, and the methods marked @on_tag take one message")
    first = next(iter(routes.values()))
    return TagRoutedPlan(
        handler=first.handler,
        payload_type=first.payload_type,
        is_batch=False,
        is_raw=False,
        publisher=first.publisher,
        routes=routes,
        other=other,
    )


def tag_expression(listener: str, routes: Mapping[str, object], given: str, has_other: bool) -> str:
    """Return the selector expression of a class with tag methods.

    Raises:
        ListenerError: The decorator selects other tags than those of the methods.
    """
    if given == "*":
        return given if has_other else " || ".join(routes)
    selected = {tag.strip() for tag in given.split("||")}
    if unreachable := sorted(set(routes) - selected):
        raise ListenerError(
            f"{listener}: selector_expression={given!r} does not select {', '.join(map(repr, unreachable))}, for which "
            "there is a method; add it, or leave selector_expression out"
        )
    return given
