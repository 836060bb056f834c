"""Who gets what: every dependency is settled before the first object is made, so that its errors come early."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from dependency_injector import providers
from pydantic import BaseModel, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from mqtemplate.context.injection.definitions import Definition, Definitions, fits
from mqtemplate.context.injection.marks import Parameter, Section, Value, name_of, read_parameters
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.errors import DependencyError

_PLAIN = (str, bytes, int, float, bool, complex, dict, list, tuple, set)
_NOTHING = object()


class Wiring:
    """Connects the providers of definitions by the types that their constructors name.

    Args:
        definitions: What there is.
        settings: Where ``Value`` and ``Section`` look.
    """

    def __init__(self, definitions: Definitions, settings: AppSettings) -> None:
        self._definitions = definitions
        self._settings = settings
        self._linked: set[int] = set()

    def link(self, definition: Definition) -> None:
        """Connect a definition and, before it, all that it uses.

        Raises:
            DependencyError: Something it asks for is missing, ambiguous, or needs itself to be built.
        """
        self._link(definition, [])

    def arguments(self, target: Callable[..., object]) -> tuple[list[Any], dict[str, Any]]:
        """What to call a class or function with, as providers; what they stand for is linked."""
        positional, named, uses = self._arguments(target, read_parameters(target, self._definitions.types_by_name()))
        for used in uses:
            self.link(used)
        return positional, named

    def choose(self, wanted: Any, name: str | None = None) -> Definition | None:
        """The one definition of a type; *name* tells two apart. None if there is none.

        Raises:
            DependencyError: Several fit, and none has that name.
        """
        fitting = self._definitions.fitting(wanted)
        if len(fitting) <= 1:
            return fitting[0] if fitting else None
        qualified = [definition for definition in fitting if definition.name == name]
        if qualified:
            return qualified[0]
        raise DependencyError(
            f"{len(fitting)} objects are a {name_of(wanted)}: {_list(fitting)}; "
            "choose one by naming the parameter after it, or give one another name by @service(name=...)"
        )

    def _link(self, definition: Definition, above: list[Definition]) -> None:
        if definition in above:
            raise DependencyError(_circle(definition, above))
        if id(definition) in self._linked:
            return
        if definition.target is not None:
            definition.parameters = read_parameters(definition.target, self._definitions.types_by_name())
            positional, named, definition.uses = self._arguments(definition.target, definition.parameters)
            assert isinstance(definition.provider, providers.BaseSingleton)
            definition.provider.set_args(*positional).set_kwargs(**named)
        for used in definition.uses:
            self._link(used, [*above, definition])
        self._linked.add(id(definition))

    def _arguments(
        self, target: Callable[..., object], parameters: list[Parameter]
    ) -> tuple[list[Any], dict[str, Any], list[Definition]]:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        uses: list[Definition] = []
        for parameter in parameters:
            argument = self._argument(target, parameter, uses)
            if argument is _NOTHING:
                continue
            if parameter.is_positional:
                positional.append(argument)
            else:
                named[parameter.name] = argument
        return positional, named, uses

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
            return TypeAdapter(parameter.wanted).validate_python(value)
        except (ValidationError, PydanticSchemaGenerationError) as exc:
            reason = (
                exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else "this type cannot be read from text"
            )
            raise DependencyError(
                f"{where}: the value of {source.text!r} is no {name_of(parameter.wanted)}: {reason}"
            ) from None

    def _missing(self, target: Callable[..., object], parameter: Parameter) -> str:
        where = f"{name_of(target)}: parameter {parameter.name!r} wants "
        if parameter.wanted in _PLAIN:
            plain = name_of(parameter.wanted)
            return (
                f"{where}a plain {plain}, and plain values are not injected by type; write "
                f"Annotated[{plain}, Value('${{some.key}}')] to take it from the configuration, or give it a default"
            )
        return (
            f"{where}{name_of(parameter.wanted)}, and nothing here is one; there is: {_list(self._definitions)}. "
            "Mark the class with @service and give it to MQApplication, or call context.register(...) with an object"
        )


def _list(definitions: Iterable[Definition]) -> str:
    return ", ".join(
        sorted(name_of(each.kind) + ("" if each.is_default else f" ({each.name})") for each in definitions)
    )


def _circle(definition: Definition, above: list[Definition]) -> str:
    ring = [*above[above.index(definition) :], definition]
    steps = [_step(upper, lower) for upper, lower in itertools.pairwise(ring)]
    return (
        f"these need each other to be built: {' -> '.join([*steps, definition.title])}; "
        "break the circle: move what both need into a third service, or pass it later by a method"
    )


def _step(upper: Definition, lower: Definition) -> str:
    """``Orders(audit)``: who asks, and by which parameter."""
    asking = [parameter.name for parameter in upper.parameters if fits(lower.kind, parameter.wanted)]
    return f"{upper.title}({asking[0]})" if asking else upper.title
