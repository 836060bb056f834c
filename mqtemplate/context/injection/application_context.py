"""The application context: what there is, who gets it, and in which order it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_type_hints

from dependency_injector import providers

from mqtemplate.broker import Broker
from mqtemplate.clock import Clock
from mqtemplate.context.injection.container import MQContainer
from mqtemplate.context.injection.definitions import Definition, Definitions, fits, snake_case
from mqtemplate.context.injection.marks import name_of, service_mark
from mqtemplate.context.injection.wiring import Wiring
from mqtemplate.context.lifecycle import Lifecycle
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import DependencyError, MQTemplateError
from mqtemplate.listener import ListenerRegistry
from mqtemplate.template import RocketMQTemplate

T = TypeVar("T")

_BUILT_IN = "built in"
_APPLICATION = "application"
_SLOTS: tuple[tuple[str, type], ...] = (
    ("clock", Clock),
    ("broker", Broker),
    ("converter", MessageConverter),
    ("template", RocketMQTemplate),
    ("listeners", ListenerRegistry),
)
"""What the container has a place for -> who may fill it."""


class Part(Protocol):
    """Something that a starter adds to run beside the listeners."""

    name: str

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConditionOutcome:
    """One line of the report about starters.

    Attributes:
        reason: Why it did not act, or what it added and where it stepped back.
    """

    starter: str
    applied: bool
    reason: str


class ApplicationContext:
    """Holds the objects of one application and builds them by the types that their constructors name.

    dependency-injector makes and keeps the objects; the context decides what goes where.

    - There is one object of each definition, made when it is first needed.
    - What the user gives goes before what a starter gives, and that before what is built in.
    - After `link` every dependency is settled; nothing can be registered any more.
    - A context is used once: what was closed is not opened again.

    Args:
        settings: The settings, which may be asked for by type as well.
        overrides: Type -> an object (or a class to build) that takes the place of everything of that type.
            The application does not close it.

    Attributes:
        container: dependency-injector's container; what is in it has the names of the definitions.
        components: What the application was given, for starters that look for marks of their own.
        parts: What starters added to run beside the listeners.
        conditions: What each starter did, and why.
        lifecycle: How to undo what is open; the first thing put in is undone last.
    """

    def __init__(self, settings: AppSettings, overrides: Mapping[type, object] | None = None) -> None:
        self.settings = settings
        self.container = MQContainer(settings=settings)
        self._definitions = Definitions()
        self._wiring = Wiring(self._definitions, settings)
        self._linked = False
        self._origin = _APPLICATION
        self._notes: list[str] = []
        self.components: tuple[object, ...] = ()
        self.parts: list[Part] = []
        self.lifecycle = Lifecycle()
        self.conditions: tuple[ConditionOutcome, ...] = ()
        self._by_component: dict[int, Definition] = {}
        self._overrides = dict(overrides or {})
        self._add_built_in()
        for kind, replacement in self._overrides.items():
            self._add_override(kind, replacement)

    # --- giving --------------------------------------------------------------------------------

    def register(self, component: object, *, as_type: type | None = None, name: str | None = None) -> bool:
        """Give the context a class to build, a function that builds, or a finished object.

        From a starter (inside `contributions`) it backs off if there is one already.

        Args:
            as_type: The type it may be asked for by, if that is not its own class or the function's return type.
            name: Tells two of one type apart; from the class by default.

        Returns:
            Whether it was taken; False if it backed off, or an override stands in its place.

        Raises:
            DependencyError: It is abstract, has no type, or its name is taken.
        """
        if self._linked:
            raise DependencyError(
                f"{name_of(component)}: the context is complete; register before the application starts"
            )
        kind, target = _kind_and_target(component, as_type)
        if self._stands_back(kind):
            return False
        mark = service_mark(component)
        chosen = name or (mark.name if mark else None) or snake_case(getattr(target, "__name__", kind.__name__))
        if (twin := self._definitions.named(chosen)) is not None:
            raise DependencyError(
                f"{name_of(kind)}: the name {chosen!r} is taken by {name_of(twin.kind)} of {twin.origin}; "
                "give one of them another by @service(name=...)"
            )
        provider = providers.Object(component) if target is None else providers.ThreadSafeSingleton(target)
        definition = Definition(chosen, kind, provider, self._origin, target)
        self._definitions.add(definition)
        self._by_component[id(component)] = definition
        self.note(f"added {name_of(kind)}")
        if not hasattr(self.container, chosen):
            self.container.set_provider(chosen, provider)
        return True

    def add_part(self, part: Part) -> None:
        """Give something that runs beside the listeners: it starts after them and stops before them."""
        self.parts.append(part)
        self.note(f"runs {part.name}")

    def note(self, text: str) -> None:
        """Say in the report what a starter did or did not do."""
        self._notes.append(text)

    @contextmanager
    def contributions(self, origin: str) -> Iterator[list[str]]:
        """What is registered inside comes from a starter: it backs off, and the notes say what happened."""
        self._origin, self._notes = origin, []
        try:
            yield self._notes
        finally:
            self._origin, self._notes = _APPLICATION, []

    def has(self, wanted: Any) -> bool:
        """Whether somebody gave one; what is only built in does not count, as it steps back for a starter."""
        return any(not definition.is_default for definition in self._definitions.fitting(wanted))

    # --- taking --------------------------------------------------------------------------------

    def get(self, wanted: type[T], name: str | None = None) -> T:
        """The object of a type, built now if it was not yet.

        Raises:
            DependencyError: There is none, several fit, or building it failed.
        """
        chosen = self._chosen(name, wanted)
        self._wiring.link(chosen)
        found: T = self.build(chosen)
        return found

    def call(self, target: Callable[..., T]) -> T:
        """Call a function, or build a class, with arguments found by its types. The result is not kept."""
        positional, named = self._wiring.arguments(target)
        result: T = providers.Factory(target, *positional, **named)()
        return result

    # --- all at once ---------------------------------------------------------------------------

    def link(self) -> None:
        """Settle who gets what.

        Raises:
            DependencyError: Something is missing, ambiguous, or needs itself.
        """
        chosen = {slot: self._chosen(slot, kind) for slot, kind in _SLOTS}
        for slot in ("template", "listeners"):
            if chosen[slot].is_default:
                chosen[slot].uses = [chosen["broker"], chosen["converter"]]
        for definition in self._definitions:
            self._wiring.link(definition)
        for slot, definition in chosen.items():
            if not definition.is_default:
                getattr(self.container, slot).override(definition.provider)
        self._linked = True

    def in_order(self) -> Iterator[Definition]:
        """The definitions that others gave, each after all that it uses."""
        seen: set[int] = set()

        def visit(definition: Definition) -> Iterator[Definition]:
            if id(definition) in seen:
                return
            seen.add(id(definition))
            for used in definition.uses:
                yield from visit(used)
            if definition.origin != _BUILT_IN:
                yield definition

        for definition in self._definitions:
            yield from visit(definition)

    def definition_for(self, wanted: type) -> Definition:
        """Which definition `get` would take.

        Raises:
            DependencyError: There is none, or several fit.
        """
        return self._chosen(None, wanted)

    def definition_of(self, component: object) -> Definition | None:
        """What became of a component; None if an override or another stands in its place."""
        return self._by_component.get(id(component))

    def build(self, definition: Definition) -> Any:
        """The object of a definition.

        Raises:
            DependencyError: Its constructor raised; our own errors pass as they are.
        """
        try:
            return definition.provider()
        except MQTemplateError:
            raise
        except Exception as exc:
            raise DependencyError(f"{definition.title} could not be built: {type(exc).__name__}: {exc}") from exc

    # --- inside --------------------------------------------------------------------------------

    def _add_built_in(self) -> None:
        container = self.container
        self._add_default("settings", AppSettings, container.settings)
        self._add_default("application_context", ApplicationContext, providers.Object(self))
        for slot, kind in _SLOTS:
            if slot != "broker":
                self._add_default(slot, kind, getattr(container, slot))

    def _add_default(self, name: str, kind: type, provider: providers.Provider[Any]) -> None:
        """Under a name that no class and no parameter can have, so that nobody's own is displaced by it."""
        self._definitions.add(Definition(f"mqtemplate.{name}", kind, provider, _BUILT_IN, is_default=True))

    def _add_override(self, kind: type, replacement: object) -> None:
        builds = inspect.isclass(replacement)
        target: Any = replacement if builds else None
        provider = providers.ThreadSafeSingleton(target) if builds else providers.Object(replacement)
        own_kind: type = target if builds else type(replacement)
        self._definitions.add(
            Definition(
                name=snake_case(kind.__name__),
                kind=own_kind if fits(own_kind, kind) else kind,  # a test double may look like nothing in particular
                provider=provider,
                origin="override",
                target=target,
                is_owned=False,
            )
        )

    def _stands_back(self, kind: type) -> bool:
        """Whether an override takes the place of everything of this kind, or a starter finds that there is one."""
        if any(fits(kind, overridden) for overridden in self._overrides):
            self.note(f"backed off: {name_of(kind)} is overridden")
            return True
        if self._origin == _APPLICATION:
            return False
        bases = [slot_kind for _, slot_kind in _SLOTS if fits(kind, slot_kind)] or [kind]
        for there in (definition for base in bases for definition in self._definitions.fitting(base)):
            if not there.is_default:
                self.note(f"backed off: there is {name_of(there.kind)} of {there.origin}")
                return True
        return False

    def _chosen(self, name: str | None, wanted: type) -> Definition:
        place = next((slot for slot, kind in _SLOTS if kind is wanted), None)
        chosen = self._wiring.choose(wanted, name or place)
        if chosen is not None:
            return chosen
        if wanted is Broker:
            raise DependencyError(
                "there is no Broker: no starter made one and the application gave none. Is mqtemplate installed (its "
                "starters are found through entry points), and is mqtemplate.embedded.enabled true? "
                "Or give MQApplication an EmbeddedBroker"
            )
        there_is = ", ".join(sorted(name_of(definition.kind) for definition in self._definitions))
        raise DependencyError(
            f"nothing here is a {name_of(wanted)}; there is: {there_is}. "
            "Mark the class with @service and give it to MQApplication, or use context.register(...)"
        )


def _kind_and_target(component: object, as_type: type | None) -> tuple[type, Callable[..., object] | None]:
    """What a component may be asked for by, and what builds it."""
    if inspect.isclass(component):
        if inspect.isabstract(component) or getattr(component, "_is_protocol", False):
            raise DependencyError(
                f"{name_of(component)} is abstract and cannot be built; give a class that implements it"
            )
        return as_type or component, component
    if inspect.isfunction(component):
        kind = as_type or _return_type(component)
        if not isinstance(kind, type) or kind is type(None):
            raise DependencyError(
                f"{name_of(component)} builds an object, so it must say which: annotate its return type with a class"
            )
        return kind, component
    return as_type or type(component), None


def _return_type(function: Callable[..., object]) -> Any:
    try:
        return get_type_hints(function).get("return")
    except NameError as exc:
        raise DependencyError(
            f"{name_of(function)}: the return type names {exc.name!r}, which is not known at run time; "
            "import it outside of 'if TYPE_CHECKING'"
        ) from exc
