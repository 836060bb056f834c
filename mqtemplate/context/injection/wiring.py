"""Resolution of dependencies, before the first object is built: errors are raised while nothing is open yet."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dependency_injector import providers
from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from mqtemplate.context.config.binding import with_durations
from mqtemplate.context.failure_report import pointing_to
from mqtemplate.context.injection.definitions import Definition, Definitions, fits
from mqtemplate.context.injection.marks import Parameter, Section, Value, name_of, read_parameters
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.errors import DependencyError

_PLAIN = (str, bytes, int, float, bool, complex, dict, list, tuple, set)
_NOTHING = object()


@dataclass(slots=True)
class Arguments:
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
        """Return the definition of a type, or among several the one with this name; None if there is none.

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
            DependencyError: There is none.
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

    def arguments(self, target: Callable[..., object]) -> Arguments:
        """Return the arguments for a class or function. The definitions that it uses need not be linked yet."""
        arguments = Arguments()
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
            DependencyError: There is none, several have the type, or building it failed.
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
                f"{where}: the value of {source.text!r} is no {name_of(parameter.wanted)}: {reason}"
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
