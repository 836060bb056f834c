"""Reading of handler signatures: the payload type, and which value each other parameter takes."""

from __future__ import annotations

import collections.abc
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mqtemplate.callables import resolved, variables_of
from mqtemplate.errors import DependencyError, ListenerError
from mqtemplate.listener.declaration.attributes import check_handler
from mqtemplate.listener.declaration.results import ResultSender
from mqtemplate.listener.handler.payload import Read, message_headers, read_message, read_queue
from mqtemplate.listener.handler.plan import Handler, HandlerPlan
from mqtemplate.listener.handler.providers import (
    Depends,
    HandlerArguments,
    ObjectSource,
    Provider,
    ReadSource,
    Scope,
    is_async,
    kind_of,
)
from mqtemplate.message import Message, MessageExt, MessageQueue

LISTS = frozenset({list, collections.abc.Sequence})
_MAPPINGS = frozenset({dict, collections.abc.Mapping})
_COLLECTORS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ALLOWED = "MessageExt, MessageQueue, or headers: dict[str, str]"
_ALLOWED_IN_BATCH = "list[MessageExt] or headers: list[dict[str, str]]"


def signature_of(function: Callable[..., object], name: str) -> inspect.Signature:
    """Return the signature of a handler or provider.

    Raises:
        ListenerError: It cannot be read.
    """
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ListenerError(f"{name}: its parameters cannot be read ({error}); wrap it in a Python function") from error


def hints_of(function: Callable[..., object], name: str) -> dict[str, Any]:
    """Return the annotations of a handler or provider.

    Raises:
        ListenerError: One of them names something that is not known.
    """
    target: Any = function
    while isinstance(target, functools.partial) or isinstance(getattr(target, "__wrapped__", None), functools.partial):
        target = target.func if isinstance(target, functools.partial) else target.__wrapped__
    if inspect.isclass(target):
        target = target.__init__
    elif not inspect.isroutine(target):
        target = type(target).__call__
    try:
        return resolved(get_type_hints(target, include_extras=True), function)
    except NameError as error:
        raise ListenerError(
            f"{name}: an annotation cannot be read: {error}; import or define the name at the top of the module, "
            "outside of 'if TYPE_CHECKING' and of functions"
        ) from error


def bare(annotation: Any) -> Any:
    """Return an annotation without its ``Annotated``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


class ParameterReader:
    """Reader of the parameters of one handler and of its providers.

    Args:
        name: Name of the handler in errors.
        is_async: True if the handler is ``async def``: only then providers may be.
        objects: Source of objects by type; None without an application.

    Attributes:
        providers: Providers that were found, each after those that it uses.
        sender: Number of the value that sends results; None if no value does.
    """

    def __init__(self, name: str, *, is_batch: bool, is_async: bool, objects: ObjectSource | None) -> None:
        self._name = name
        self._is_batch = is_batch
        self._is_async = is_async
        self._objects = objects
        self._slots: dict[Callable[..., object], int] = {}
        self._opening: list[Callable[..., object]] = []
        self.providers: list[Provider] = []
        self.sender: int | None = None

    def read(
        self, function: Callable[..., object], parameters: Iterable[inspect.Parameter], name: str
    ) -> HandlerArguments:
        """Return the arguments for parameters of a function.

        Raises:
            ListenerError: A parameter takes a value that neither a message nor the application has.
        """
        hints = hints_of(function, name)
        reads: dict[str, ReadSource] = {}
        constants: dict[str, object] = {}
        slots: dict[str, int] = {}
        for parameter in parameters:
            annotation = hints.get(parameter.name)
            depends = _depends(parameter, annotation)
            if depends is not None and parameter.kind is parameter.POSITIONAL_ONLY:
                raise self._unknown(parameter, annotation, name)
            if depends is not None:
                slots[parameter.name] = self._slot(depends.provider, f"{name}: parameter {parameter.name!r}")
                self._note_sender(parameter, annotation, slots[parameter.name])
            elif (extra := _extra(parameter, annotation, self._is_batch)) is not None:
                reads[parameter.name] = _of_batch(extra) if self._is_batch else extra
            elif parameter.default is parameter.empty and parameter.kind not in _COLLECTORS:
                constants[parameter.name] = self._object(function, parameter, annotation, name)
        return HandlerArguments(reads, constants, slots)

    def _slot(self, provider: Callable[..., object], where: str) -> int:
        """Return the number of a provider's value. A provider is called once for each message."""
        if not callable(provider):
            raise ListenerError(f"{where}: Depends takes a function, got {provider!r}")
        if provider in self._opening:
            names = " -> ".join(map(_name_of, [*self._opening, provider]))
            raise ListenerError(f"{where}: these providers need each other: {names}; break the circle")
        if provider not in self._slots:
            name = f"{where}: provider {_name_of(provider)}"
            kind = kind_of(provider, where)
            if kind.is_async and not self._is_async:
                raise ListenerError(
                    f"{name} is async, and the handler is not; write the handler with 'async def', or the provider "
                    "with 'def'"
                )
            self._opening.append(provider)
            arguments = self.read(provider, signature_of(provider, name).parameters.values(), name)
            self._opening.pop()
            self.providers.append(Provider(arguments.bind(provider), _name_of(provider), kind, arguments))
            self._slots[provider] = len(self.providers)
        return self._slots[provider]

    def _note_sender(self, parameter: inspect.Parameter, annotation: Any, slot: int) -> None:
        kind = bare(annotation)
        if self._opening or not (isinstance(kind, type) and issubclass(kind, ResultSender)):
            return
        if self.sender is not None:
            raise ListenerError(
                f"{self._name}: parameter {parameter.name!r} is the second one that sends results; keep one"
            )
        self.sender = slot

    def _object(
        self, function: Callable[..., object], parameter: inspect.Parameter, annotation: Any, name: str
    ) -> object:
        if self._objects is None or annotation is None or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise self._unknown(parameter, annotation, name)
        try:
            return self._objects.argument(function, parameter, annotation)
        except DependencyError as error:
            raise ListenerError(f"{name}: {error}") from error

    def _unknown(self, parameter: inspect.Parameter, annotation: Any, name: str) -> ListenerError:
        shown = "no type" if annotation is None else f"the type {inspect.formatannotation(annotation)}"
        if parameter.kind is parameter.POSITIONAL_ONLY:
            shown += " and can only be passed by position"
        return ListenerError(
            f"{name}: parameter {parameter.name!r} has {shown}; after the payload a handler may take "
            f"{_ALLOWED_IN_BATCH if self._is_batch else _ALLOWED}, objects of the application by their types, and "
            "values of functions: Annotated[Session, Depends(open_session)]"
        )


def _name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", function)).rpartition("<locals>.")[2]


def _depends(parameter: inspect.Parameter, annotation: Any) -> Depends | None:
    if isinstance(parameter.default, Depends):
        return parameter.default
    if get_origin(annotation) is not Annotated:
        return None
    return next((extra for extra in get_args(annotation)[1:] if isinstance(extra, Depends)), None)


def _of_batch(extra: Read) -> ReadSource:
    """Return the function that reads a parameter's value of the list of messages."""
    if extra is read_queue:  # only an orderly batch may have it: all its messages are of one queue
        return lambda messages: extra(messages[0])
    return lambda messages: [extra(message) for message in messages]


def takes_queue(parameters: Sequence[inspect.Parameter], hints: dict[str, Any]) -> bool:
    """Return True if one of the parameters takes the queue of the messages."""
    return any(bare(hints.get(parameter.name)) is MessageQueue for parameter in parameters)


def _extra(parameter: inspect.Parameter, annotation: Any, is_batch: bool) -> Read | None:
    """Return the function that reads the value of a parameter; None if it is unknown, or not passed by name."""
    if parameter.kind in (*_COLLECTORS, inspect.Parameter.POSITIONAL_ONLY):
        return None
    kind = bare(annotation)
    if kind is MessageQueue:
        return read_queue
    if is_batch:
        if get_origin(kind) not in LISTS:
            return None
        kind = bare(get_args(kind)[0])
    if kind in (Message, MessageExt):
        return read_message
    is_text_mapping = get_origin(kind) in _MAPPINGS and get_args(kind) == (str, str)
    is_named_headers = parameter.name == "headers" and (kind in _MAPPINGS or kind is None)
    return message_headers if is_text_mapping or is_named_headers else None


def plan_handler(
    handler: Handler,
    name: str,
    *,
    batch: bool | None = None,
    is_orderly: bool = False,
    objects: ObjectSource | None = None,
) -> HandlerPlan:
    """Return how to call a handler, from its signature.

    Args:
        handler: A function, or a method bound to its object.
        name: Name of the handler in errors.
        batch: True if a list means several messages, False if one; None decides by the annotation.
        objects: Source of the objects that parameters take by type.

    Raises:
        ListenerError: A parameter takes a value that neither a message nor the application has.
    """
    check_handler(handler, f"{name}: the handler")
    parameters = list(signature_of(handler, name).parameters.values())
    hints = hints_of(handler, name)
    if not parameters or parameters[0].kind not in (
        parameters[0].POSITIONAL_ONLY,
        parameters[0].POSITIONAL_OR_KEYWORD,
    ):
        raise ListenerError(f"{name}: has no parameter for the payload; write it first, such as (message: str)")
    payload, *others = parameters
    if payload.name not in hints:
        raise ListenerError(
            f"{name}: parameter {payload.name!r} has no type; annotate it with the type to convert the body to: "
            "str, bytes, dict, a dataclass, a pydantic model, MessageExt, or list[...] of one of these for batches"
        )
    if unbound := variables_of(hints[payload.name]):
        raise ListenerError(
            f"{name}: parameter {payload.name!r} has the type variable {unbound[0]}, and nothing says which type it "
            "is; name it in the base class, such as 'class Orders(Listener[Order])', or give the variable a bound"
        )
    item_type, is_batch = _payload(hints[payload.name], batch, f"{name}: parameter {payload.name!r}")
    kind = bare(item_type)
    if kind is MessageQueue:
        raise ListenerError(f"{name}: the first parameter is the payload; put the MessageQueue after it")
    if is_batch and not is_orderly and takes_queue(others, hints):
        raise ListenerError(f"{name}: a concurrent batch mixes queues; take list[MessageExt], or use ORDERLY")
    reader = ParameterReader(name, is_batch=is_batch, is_async=is_async(handler), objects=objects)
    arguments = reader.read(handler, others, name)
    return HandlerPlan(
        handler=handler,
        payload_type=item_type,
        is_batch=is_batch,
        is_raw=kind in (Message, MessageExt),
        arguments=arguments,
        scope=Scope(tuple(reader.providers), reader.sender),
    )


def _payload(annotation: Any, batch: bool | None, where: str) -> tuple[Any, bool]:
    """Return the type of one payload, and True if the handler takes a batch."""
    kind = bare(annotation)
    is_list = kind in LISTS or get_origin(kind) in LISTS
    if not is_list:
        if batch:
            raise ListenerError(
                f"{where}: batch=True needs a list, and it is annotated {annotation!r}; write one, such as list[dict]"
            )
        return annotation, False
    if batch is False:
        return annotation, False
    items = get_args(kind)
    if not items and batch is None:
        raise ListenerError(
            f"{where}: a bare list may mean two things; write list[Order] for a batch of messages, "
            "or @message_listener(..., batch=False) if each body is a JSON list"
        )
    return (items[0] if items else Any), True
