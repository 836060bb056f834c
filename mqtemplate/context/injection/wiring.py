"""Definitions of the objects in an application, and the resolution of their dependencies.

All dependencies are resolved before the first object is built: errors are raised while nothing is open yet."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin

from dependency_injector import providers
from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from mqtemplate.callables import arguments_of_bases
from mqtemplate.context.config.binding import with_durations
from mqtemplate.context.injection.marks import Parameter, Section, Value, name_of, pointing_to, read_parameters
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.errors import DependencyError


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One object that the application has, or builds when it is needed.

    Attributes:
        name: Unique name. A parameter of this name gets this object if several have its type.
        kind: Type of the object: its class, or the return type of the function that builds it.
        provider: dependency-injector's provider, which builds the object once.
        origin: Source, for reports: ``application``, ``starter embedded``, ``built in``, ``override``.
        target: Class or function that builds the object; None for a finished object.
        is_default: True: another definition of the same type replaces it.
        replaced_by: Names of the definitions that replace a default; empty for any. Others stand beside it.
        is_owned: True: the application stops the object. A test owns its overrides itself.
        qualifier: Name of a further template: the object is chosen by this name or by its own class only.
        alias: The type with its arguments, such as ``Repo[Order]``, if they are known and the class does not name them.
    """

    name: str
    kind: type
    provider: providers.Provider[Any]
    origin: str
    target: Callable[..., object] | None = None
    is_default: bool = False
    replaced_by: frozenset[str] = frozenset()
    is_owned: bool = True
    qualifier: str | None = None
    alias: Any = None

    def is_called(self, name: str) -> bool:
        """Return True for the name of the object, as we write it or as Java does: ``audit_log``, ``auditLog``."""
        names = {self.name, self.qualifier, *self.replaced_by}
        return name in names or snake_case(name) in names

    @property
    def title(self) -> str:
        """Name of the class or function, for reports."""
        return name_of(self.target if self.target is not None else self.kind)

    @property
    def type_name(self) -> str:
        """Name of the type, with its arguments if they are known."""
        return name_of(self.kind if self.alias is None else self.alias)


class Definitions(dict[str, Definition]):
    """All definitions of an application by name, in the order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self._fitting: dict[Any, list[Definition]] = {}  # found before; a harness asks in each of its steps

    def add(self, definition: Definition) -> None:
        """Add a definition under its name."""
        self[definition.name] = definition
        self._fitting.clear()

    def fitting(self, wanted: Any) -> list[Definition]:
        """Return the definitions of a type; defaults only if none replaces them."""
        if wanted not in self._fitting:
            self._fitting[wanted] = self._find_fitting(wanted)
        return list(self._fitting[wanted])

    def _find_fitting(self, wanted: Any) -> list[Definition]:
        found = [definition for definition in self.values() if fits(definition.kind, wanted, definition.alias)]
        found = [definition for definition in found if not _is_replaced(definition, found)]
        if exact := [each for each in found if _known_arguments(each.kind, wanted, each.alias)]:
            return exact
        # A class that has a protocol as base class goes before one that merely has its methods.
        return [definition for definition in found if _is_subclass(definition.kind, wanted)] or found


def _is_replaced(definition: Definition, by: Iterable[Definition]) -> bool:
    """Return True for a default that one of the other definitions replaces."""
    if not definition.is_default:
        return False
    others = (other for other in by if not other.is_default)
    return any(
        not definition.replaced_by or other.origin == "override" or other.name in definition.replaced_by
        for other in others
    )


def fits(kind: type, wanted: Any, alias: Any = None) -> bool:
    """Return True if *kind* can be injected as *wanted*: it is the class, a subclass, or implements the protocol.

    ``Repo[Order]`` takes no ``Repo[User]``. It takes a ``Repo`` whose arguments are not known, if there is no other.

    Args:
        alias: *kind* with its arguments, if they are known.
    """
    given, wanted = wanted, get_origin(wanted) or wanted
    if not isinstance(wanted, type) or wanted is object:
        return False
    if _is_subclass(kind, wanted):
        arguments = _known_arguments(kind, given, alias)
        return arguments is None or all(map(_is_same, arguments, get_args(given)))
    if not getattr(wanted, "_is_protocol", False):
        return False
    members = list(_protocol_members(wanted))
    return bool(members) and all(_has_member(kind, member) for member in members)


def _known_arguments(kind: type, wanted: Any, alias: Any) -> tuple[Any, ...] | None:
    """Return the arguments of *kind* for a generic type; None if there are none, or one is unknown."""
    origin = get_origin(wanted)
    if not isinstance(origin, type) or not _is_subclass(kind, origin):
        return None
    arguments = arguments_of_bases(kind, origin, alias)
    is_known = arguments is not None and len(arguments) == len(get_args(wanted))
    return arguments if is_known and not any(isinstance(each, TypeVar) for each in arguments or ()) else None


def _is_same(argument: Any, wanted: Any) -> bool:
    return argument == wanted or any(each is Any or isinstance(each, TypeVar) for each in (argument, wanted))


def _is_subclass(kind: type, wanted: Any) -> bool:
    wanted = get_origin(wanted) or wanted
    return isinstance(wanted, type) and wanted in inspect.getmro(kind)


def _protocol_members(protocol: type) -> Iterable[str]:
    for base in inspect.getmro(protocol):
        if base in (object, Protocol, Generic) or not getattr(base, "_is_protocol", False):
            continue
        for name in (*vars(base), *getattr(base, "__annotations__", {})):
            if not name.startswith(("__", "_abc_", "_is_")) or name == "__call__":
                yield name


def _has_member(kind: type, name: str) -> bool:
    return hasattr(kind, name) or any(name in getattr(base, "__annotations__", {}) for base in inspect.getmro(kind))


def snake_case(class_name: str) -> str:
    """Return a class name in snake_case: ``AuditService`` -> ``audit_service``, ``SQLStore`` -> ``sql_store``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name.lstrip("_"))
    return words.lower()


_PLAIN = (str, bytes, int, float, bool, complex, dict, list, tuple, set)
_NOTHING = object()


@dataclass(slots=True)
class ProvidedArguments:
    """Arguments of a call, as providers.

    Attributes:
        uses: Definitions of the objects among the arguments.
    """

    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    uses: list[Definition] = field(default_factory=list)


class Wiring:
    """Resolver of dependencies: it connects the providers of definitions by the types of the parameters.

    Args:
        definitions: All definitions of the application.
        settings: The configuration, for `Value` and `Section`.
    """

    def __init__(self, definitions: Definitions, settings: AppSettings) -> None:
        self._definitions = definitions
        self._settings = settings
        self._uses: dict[Definition, list[Definition]] = {}  # of each linked definition
        self._built_in_uses: dict[Definition, list[Definition]] = {}

    def add_built_in(self, definition: Definition, uses: list[Definition]) -> None:
        """Add the definitions that a built-in object uses. Its provider is connected already."""
        self._built_in_uses[definition] = uses
        self._uses.pop(definition, None)

    def choose(self, wanted: Any, name: str | None = None) -> Definition | None:
        """Return the definition of a type, or among several the one with this name; None without one.

        Raises:
            DependencyError: Several have the type, and none of them the name.
        """
        fitting = self._definitions.fitting(wanted)
        qualified = [definition for definition in fitting if definition.qualifier is not None]
        chosen = next((definition for definition in qualified if definition.qualifier == name), None)
        if chosen is not None:
            return chosen
        fitting = [definition for definition in fitting if definition not in qualified] or fitting
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        named = [definition for definition in fitting if definition.name == name]
        named = named or [definition for definition in fitting if definition.is_default]
        if named:
            return named[0]
        raise DependencyError(
            f"{len(fitting)} objects are a {name_of(wanted)}: {_list(fitting)}; "
            "choose one by naming the parameter after it, or give one another name by @service(name=...)"
        )

    def choose_named(self, wanted: Any, name: str) -> Definition:
        """Return the definition of a type that has this name.

        Raises:
            DependencyError: No object has the type.
        """
        fitting = self._definitions.fitting(wanted)
        found = next((definition for definition in fitting if definition.is_called(name)), None)
        if found is None:
            known = sorted(each.qualifier or each.name.removeprefix("mqtemplate.") for each in fitting)
            raise DependencyError(
                f"no {name_of(wanted)} is called {name!r} (there is: {', '.join(known) or 'none'}); "
                "choose one of these names, or declare it: a section rocketmq.templates.<name>, or @service(name=...)"
            )
        return found

    def in_order(self) -> Iterator[Definition]:
        """Yield the definitions, each after all that it uses."""
        seen: set[Definition] = set()

        def visit(definition: Definition) -> Iterator[Definition]:
            if definition in seen:
                return
            seen.add(definition)
            for used in self._uses.get(definition, ()):
                yield from visit(used)
            yield definition

        for definition in self._definitions.values():
            yield from visit(definition)

    def link(self, definition: Definition, above: Sequence[Definition] = ()) -> None:
        """Connect a definition and, before it, all that it uses.

        Args:
            above: Definitions that are being linked, each of which uses the next.

        Raises:
            DependencyError: A dependency is missing or ambiguous, or part of a circle.
        """
        if definition in above:
            raise DependencyError(self._circle(definition, above))
        if definition in self._uses:
            return
        uses = self._built_in_uses.get(definition, [])
        if definition.target is not None:
            with pointing_to(definition.target):
                arguments = self.arguments(definition.target)
            assert isinstance(definition.provider, providers.BaseSingleton)
            definition.provider.set_args(*arguments.positional).set_kwargs(**arguments.named)
            uses = arguments.uses
        for used in uses:
            self.link(used, (*above, definition))
        self._uses[definition] = uses

    def arguments(self, target: Callable[..., object]) -> ProvidedArguments:
        """Return the arguments for a class or function. The definitions that it uses need not be linked yet."""
        arguments = ProvidedArguments()
        for parameter in self._parameters(target):
            argument = self._argument(target, parameter, arguments.uses)
            if argument is _NOTHING:
                continue
            if parameter.is_positional:
                arguments.positional.append(argument)
            else:
                arguments.named[parameter.name] = argument
        return arguments

    def object_for(self, target: Callable[..., object], parameter: Parameter) -> object:
        """Return the object for one parameter; build it if necessary.

        Raises:
            DependencyError: No object or several have the type, or building it failed.
        """
        uses: list[Definition] = []
        found = self._argument(target, parameter, uses)
        for used in uses:
            self.link(used)
        return found()

    def _parameters(self, target: Callable[..., object]) -> list[Parameter]:
        return read_parameters(target, {each.kind.__name__: each.kind for each in self._definitions.values()})

    def _argument(self, target: Callable[..., object], parameter: Parameter, uses: list[Definition]) -> Any:
        if parameter.source is not None:
            return providers.Object(self._configured(target, parameter, parameter.source))
        if parameter.wanted is inspect.Parameter.empty:
            return _NOTHING
        if parameter.many:
            found = self._definitions.fitting(parameter.wanted)
            if not found and parameter.has_default:
                return _NOTHING
            uses += found
            return providers.List(*(definition.provider for definition in found))
        try:
            if parameter.chosen is not None:
                chosen: Definition | None = self.choose_named(parameter.wanted, parameter.chosen)
            else:
                chosen = self.choose(parameter.wanted, parameter.name)
        except DependencyError as exc:
            raise DependencyError(f"{name_of(target)}: parameter {parameter.name!r}: {exc}") from None
        if chosen is not None:
            uses.append(chosen)
            return chosen.provider
        if parameter.is_optional:
            return _NOTHING if parameter.has_default else providers.Object(None)
        raise DependencyError(self._missing(target, parameter))

    def _configured(self, target: Callable[..., object], parameter: Parameter, source: Value | Section) -> object:
        where = f"{name_of(target)}: parameter {parameter.name!r}"
        if isinstance(source, Section):
            if not (isinstance(parameter.wanted, type) and issubclass(parameter.wanted, BaseModel)):
                raise DependencyError(
                    f"{where}: Section({source.key!r}) fills a pydantic model, got {name_of(parameter.wanted)}"
                )
            return self._settings.bind(source.key, parameter.wanted)
        value = self._settings.resolve(source.text, where)
        if value == "" and parameter.is_optional and parameter.wanted is not str and not parameter.has_default:
            return None
        try:
            wanted = parameter.wanted
            return TypeAdapter(wanted).validate_python(with_durations(value) if wanted is timedelta else value)
        except (ValidationError, PydanticSchemaGenerationError) as exc:
            reason = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else "text cannot be read as this type"
            raise DependencyError(
                f"{where}: the value of {source.text!r} is not of type {name_of(parameter.wanted)}: {reason}"
            ) from None

    def _missing(self, target: Callable[..., object], parameter: Parameter) -> str:
        where = f"{name_of(target)}: parameter {parameter.name!r} needs "
        if parameter.wanted in _PLAIN:
            plain = name_of(parameter.wanted)
            return (
                f"{where}a plain {plain}, and plain values are not injected by type; write "
                f"Annotated[{plain}, Value('${{some.key}}')] to take it from the configuration, or give it a default"
            )
        there_is = _list(self._definitions.values())
        return (
            f"{where}{name_of(parameter.wanted)}, and no object here is one (there is: {there_is}); "
            "mark the class with @service and give it to MQApplication, or call context.register(...) with an object"
        )

    def _circle(self, definition: Definition, above: Sequence[Definition]) -> str:
        circle = [*above[above.index(definition) :], definition]
        steps = [self._step(user, used) for user, used in itertools.pairwise(circle)]
        return (
            f"these need each other to be built: {' -> '.join([*steps, definition.title])}; "
            "break the circle: move what both need into a third service, or pass it later by a method"
        )

    def _step(self, user: Definition, used: Definition) -> str:
        """Return ``Orders(audit)``: the definition, and the parameter that needs the next one."""
        parameters = [] if user.target is None else self._parameters(user.target)
        names = [parameter.name for parameter in parameters if fits(used.kind, parameter.wanted, used.alias)]
        return f"{user.title}({names[0]})" if names else user.title


def _list(definitions: Iterable[Definition]) -> str:
    texts = (each.type_name + ("" if each.is_default else f" ({each.name})") for each in definitions)
    return ", ".join(sorted(texts))
