"""The application context: the definitions of an application, their dependencies, and their objects."""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_origin

from dependency_injector import providers

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import Observation
from mqtemplate.calls.middlewares import middleware_order
from mqtemplate.clock import Clock
from mqtemplate.context.injection.built_in import BuiltInProviders
from mqtemplate.context.injection.lifecycle import Lifecycle
from mqtemplate.context.injection.marks import name_of, read_parameter, service_mark, type_hints
from mqtemplate.context.injection.wiring import Definition, Definitions, Wiring, fits, snake_case
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import DependencyError, MQTemplateError, UnsupportedError
from mqtemplate.listener.handler.providers import HandlerScope
from mqtemplate.listener.registry import ListenerRegistry
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.template.rocketmq_template import RocketMQTemplate

if TYPE_CHECKING:
    from dependency_injector.containers import DynamicContainer

    from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig


T = TypeVar("T")

_NOTHING_TO_DO = "nothing to do"
BUILT_IN = "built in"
"""Origin of the objects that every application has."""
_APPLICATION = "application"
_SLOTS: dict[str, type] = {
    # name of the provider in `BuiltInProviders` -> type of the objects that may replace it
    "clock": Clock,
    "broker": Broker,
    "converter": MessageConverter,
    "observation": Observation,
    "template": RocketMQTemplate,
    "listeners": ListenerRegistry,
    "schedules": Schedules,
}


_TEMPLATE_NAMES = frozenset({"template", "rocketmq_template", snake_case("RocketMQTemplate")})
"""Names by which a template of the application becomes its template; one of another name stands beside it."""


BrokerFactory = Callable[[AppSettings, Clock], Broker]
"""Function that creates the broker which settings choose."""


@dataclass(frozen=True, slots=True)
class NamedBroker:
    """A started broker beside the application's own.

    Attributes:
        name: Name of the template that declared it, or the address that a listener names.
    """

    name: str
    broker: Broker


class FurtherBrokers(ABC):
    """The brokers of an application beside its own: of templates, then of listeners."""

    @abstractmethod
    def brokers(self) -> list[NamedBroker]:
        """Return the brokers of templates, then the brokers of listeners, without the application's own."""


class Part(Protocol):
    """A component that a starter adds and that runs beside the listeners."""

    name: str

    def start(self) -> None:
        """Start; the listeners run already."""

    def stop(self) -> None:
        """Stop; the listeners run still."""


@dataclass(frozen=True, slots=True)
class ConditionOutcome:
    """One line of the report about starters.

    Attributes:
        reason: Reason why the starter did not act, or what it added and where it backed off.
        is_installed: False: a module that the starter needs is not installed.
    """

    starter: str
    applied: bool
    reason: str
    is_installed: bool = True

    @property
    def has_acted(self) -> bool:
        """True if the starter was applied and had something to do."""
        return self.applied and not self.reason.startswith(_NOTHING_TO_DO)


class ApplicationContext:
    """The objects of one application, built with arguments by the types of their constructors.

    dependency-injector builds and stores the objects; the context decides which object a constructor gets.

    - There is one object for each definition, built when it is first needed.
    - An object of the application has priority over one of a starter, and that over a built-in one.
    - After `link` every dependency is resolved, and nothing can be registered any more.
    - A context is used once: it does not open again what was closed.

    Args:
        settings: The settings; they can be injected too.
        overrides: Type -> an object (or a class to build) that replaces everything of that type. The application does
            not close it.
        components: Components of the application, for starters that search for marks of their own.

    Attributes:
        built_in: Providers of the objects that every application has.
        parts: Components that starters added to run beside the listeners.
        handler_scopes: Contexts of frameworks around each call of a handler.
        configured_middlewares: Middlewares that the configuration names.
        conditions: The outcome of each starter.
        lifecycle: Stops of everything that is open; the last one added runs first.
        is_ready: Set while the application is ready; a part that fails while it runs clears it.
        broker_factories: Functions of the starters that find the factory of a further broker.
        owns_process: True while ``run()`` has the process to itself: starters may then write to standard error.
    """

    def __init__(
        self,
        settings: AppSettings,
        overrides: Mapping[type, object] | None = None,
        components: tuple[object, ...] = (),
        *,
        is_ready: threading.Event | None = None,
    ) -> None:
        self.settings = settings
        self.components = components
        self.configured_middlewares = settings.mqtemplate.configured_middlewares
        self.built_in = BuiltInProviders(settings)
        self.parts: list[Part] = []
        self.handler_scopes: list[HandlerScope] = []
        self.conditions: list[ConditionOutcome] = []
        self.broker_factories: list[Callable[[AppSettings], BrokerFactory | None]] = []
        self.lifecycle = Lifecycle()
        self.owns_process = False
        self.is_ready = is_ready or threading.Event()
        self._definitions = Definitions()
        self._wiring = Wiring(self._definitions, settings)
        self._linked = False
        self._container: DynamicContainer | None = None
        self._origin = _APPLICATION
        self._notes: list[str] = []
        self._by_component: dict[int, Definition] = {}
        self._reload: Callable[[str], ReloadedConfig] | None = None
        self._overrides = dict(overrides or {})
        self.built_in.listeners.add_kwargs(
            objects=HandlerObjects(self, self._wiring), template=partial(self.get, RocketMQTemplate)
        )
        self._add_built_in()
        for kind, replacement in self._overrides.items():
            self._add_override(kind, replacement)

    def on_reload(self, reload: Callable[[str], ReloadedConfig]) -> None:
        """Let *reload* read the configuration again while the application runs. It gets the reason, for the log."""
        self._reload = reload

    @property
    def can_reload(self) -> bool:
        """True if `reload` reads the configuration again."""
        return self._reload is not None

    def reload(self, reason: str) -> ReloadedConfig:
        """Read the configuration again, and return what has changed.

        Raises:
            UnsupportedError: The program that has started the application reads it at its start only.
        """
        if self._reload is None:
            raise UnsupportedError(
                "this application was started by a program that reads its configuration once; start it with "
                "mqtemplate run, or restart the program"
            )
        return self._reload(reason)

    # --- registration --------------------------------------------------------------------------

    def register(self, component: object, *, as_type: type | None = None, name: str | None = None) -> bool:
        """Add a class to build, a function that builds an object, or a finished object.

        From a starter (inside `contributions`) it backs off if the application has an object of the type.

        Args:
            as_type: Type by which it is injected, if that is not its own class or the function's return type.
            name: Distinguishes several objects of one type; by default the class's name in snake_case.

        Returns:
            True if it was added; False if it backed off, or an override replaces it.

        Raises:
            DependencyError: It is abstract, has no type, or its name is taken.
        """
        if self._linked:
            raise DependencyError(
                f"{name_of(component)}: the context is complete; register before the application starts"
            )
        kind, target, alias = _kind_and_target(component, as_type)
        if self._backs_off(kind, alias):
            return False
        mark = service_mark(component)
        chosen = name or (mark.name if mark else None) or snake_case(getattr(target, "__name__", kind.__name__))
        if (twin := self._definitions.get(chosen)) is not None:
            raise DependencyError(
                f"{name_of(kind)}: the name {chosen!r} is taken by {name_of(twin.kind)} of {twin.origin}; "
                "give one of them another by @service(name=...)"
            )
        provider = providers.Object(component) if target is None else providers.ThreadSafeSingleton(target)
        definition = Definition(chosen, kind, provider, self._origin, target, alias=alias)
        self._definitions.add(definition)
        self._by_component[id(component)] = definition
        self.note(f"added {name_of(kind)}")
        return True

    def add_qualified(
        self, qualifier: str, kind: type, build: Callable[..., object], uses: Sequence[Definition]
    ) -> Definition:
        """Add an object that is injected by its class or by a name, beside the application's own of that type.

        Args:
            qualifier: The name.
            build: Builds the object from the objects of *uses*, in this order.
        """
        provider = providers.ThreadSafeSingleton(build, *(each.provider for each in uses))
        name = f"rocketmq.templates.{qualifier}.{snake_case(kind.__name__)}"  # with dots: no class has such a name
        definition = Definition(name, kind, provider, "configuration", qualifier=qualifier)
        self._definitions.add(definition)
        self._wiring.add_built_in(definition, list(uses))
        return definition

    def add_alias(self, qualifier: str, definition: Definition) -> None:
        """Let an object be injected by one more name."""
        name = f"rocketmq.templates.{qualifier}.{snake_case(definition.kind.__name__)}"
        alias = replace(definition, name=name, origin="configuration", is_owned=False, qualifier=qualifier, target=None)
        self._definitions.add(alias)
        self._wiring.add_built_in(alias, [definition])

    def qualified(self, wanted: type) -> list[Definition]:
        """Return the definitions of a type that were added with a name."""
        return [each for each in self._definitions.fitting(wanted) if each.qualifier is not None and each.is_owned]

    def add_part(self, part: Part) -> None:
        """Add a component that runs beside the listeners: it starts after them and stops before them."""
        self.parts.append(part)
        self.note(f"runs {part.name}")

    def add_handler_scope(
        self,
        scope: Callable[[], AbstractContextManager[object]],
        async_scope: Callable[[], AbstractAsyncContextManager[object]] | None = None,
    ) -> None:
        """Run each call of a handler inside a context, such as the application context of a web framework.

        Args:
            async_scope: The context for ``async def`` handlers; by default *scope*, entered on the event loop.
        """
        self.handler_scopes.append(HandlerScope(scope, async_scope))
        self.note("adds a context around handlers")

    def note_nothing_to_do(self, reason: str) -> None:
        """Note that the current starter has nothing to do in this application."""
        self.note(f"{_NOTHING_TO_DO}: {reason}")

    def note(self, text: str) -> None:
        """Add a note to the report about the current starter."""
        self._notes.append(text)

    @contextmanager
    def contributions(self, origin: str) -> Iterator[list[str]]:
        """Register on behalf of a starter: `register` backs off, and the notes describe what it did."""
        self._origin, self._notes = origin, []
        try:
            yield self._notes
        finally:
            self._origin, self._notes = _APPLICATION, []

    def has(self, wanted: Any) -> bool:
        """Return True if the application or a starter gave an object of the type; built-in ones do not count."""
        return any(not definition.is_default for definition in self._definitions.fitting(wanted))

    # --- objects -------------------------------------------------------------------------------

    def get(self, wanted: type[T], name: str | None = None) -> T:
        """Return the object of a type; build it if necessary.

        Raises:
            DependencyError: No object or several have the type, or building it failed.
        """
        chosen = self.definition_for(wanted, name)
        self._wiring.link(chosen)
        found: T = self.build(chosen)
        return found

    @property
    def container(self) -> DynamicContainer:
        """The objects as a container of dependency-injector, for its ``wire``. They are built on first use.

        Its providers have the names of the definitions. The built-in objects are ``broker``, ``template``,
        ``listeners``, ``schedules``, ``converter``, ``clock``, ``observation``, ``settings``, ``application_context``.
        """
        if self._container is None:
            from dependency_injector.containers import DynamicContainer  # imports all web frameworks that are installed

            self._container = DynamicContainer()
        found = {name.removeprefix("mqtemplate."): each.provider for name, each in self._definitions.items()}
        for name, provider in {**found, **{slot: getattr(self.built_in, slot) for slot in _SLOTS}}.items():
            self._container.set_provider(name, provider)
        return self._container

    @property
    def brokers(self) -> Mapping[str, Broker]:
        """All brokers by name: ``broker`` for the application's own; then the name of the template for a broker of a
        further template, and the address for a broker that a listener names."""
        own: Broker = self.get(Broker)  # type: ignore[type-abstract]  # selected by its base class
        further: FurtherBrokers = self.get(FurtherBrokers)  # type: ignore[type-abstract]
        return {"broker": own, **{each.name: each.broker for each in further.brokers()}}

    def call(self, target: Callable[..., T]) -> T:
        """Call a function or class with arguments by the types of its parameters. The result is not stored."""
        arguments = self._wiring.arguments(target)
        for used in arguments.uses:
            self._wiring.link(used)
        result: T = providers.Factory(target, *arguments.positional, **arguments.named)()
        return result

    def build(self, definition: Definition) -> Any:
        """Return the object of a definition.

        Raises:
            DependencyError: Its constructor raised; the library's own errors are raised as they are.
        """
        try:
            return definition.provider()
        except MQTemplateError:
            raise
        except Exception as exc:
            raise DependencyError(f"{definition.title} could not be built: {type(exc).__name__}: {exc}") from exc

    # --- definitions ---------------------------------------------------------------------------

    def link(self) -> None:
        """Resolve all dependencies.

        Raises:
            DependencyError: A dependency is missing or ambiguous, or part of a circle.
        """
        chosen = {slot: self.definition_for(kind) for slot, kind in _SLOTS.items()}
        senders = self.middlewares("send")
        self.built_in.template.add_kwargs(middlewares=providers.List(*(each.provider for each in senders)))
        for slot in ("template", "listeners", "schedules"):
            if chosen[slot].is_default:
                more = senders if slot == "template" else []
                built_in = [chosen[used] for used in ("broker", "converter", "observation")]
                self._wiring.add_built_in(chosen[slot], [*built_in, *more])
        for definition in self._definitions.values():
            self._wiring.link(definition)
        for slot, definition in chosen.items():
            if not definition.is_default:
                getattr(self.built_in, slot).override(definition.provider)
        self._linked = True

    def in_order(self) -> Iterator[Definition]:
        """Yield the definitions that are not built in, each after all that it uses."""
        return (definition for definition in self._wiring.in_order() if definition.origin != BUILT_IN)

    def definition_for(self, wanted: type, name: str | None = None) -> Definition:
        """Return the definition whose object `get` returns.

        Raises:
            DependencyError: No object or several have the type.
        """
        slot = next((slot for slot, kind in _SLOTS.items() if kind is wanted), None)
        chosen = self._wiring.choose(wanted, name or slot)
        if chosen is not None:
            return chosen
        if wanted is Broker:
            raise DependencyError(
                "there is no Broker: no starter created one and the application has none; see that mqtemplate is "
                "installed (its starters are found through entry points) and that mqtemplate.embedded.enabled is true, "
                "or give MQApplication an EmbeddedBroker"
            )
        there_is = ", ".join(sorted(definition.type_name for definition in self._definitions.values()))
        raise DependencyError(
            f"no object here is a {name_of(wanted)} (there is: {there_is}); "
            "mark the class with @service and give it to MQApplication, or use context.register(...)"
        )

    def definition_of(self, component: object) -> Definition | None:
        """Return the definition of a component; None if an override or another object replaces it."""
        return self._by_component.get(id(component))

    def middlewares(self, method: str) -> list[Definition]:
        """Return the definitions of the middlewares that have a method, the outermost first.

        Args:
            method: ``send`` for the middlewares of all templates, ``consume`` for the middlewares of all listeners.
        """
        configured = self.configured_middlewares
        marked = [each for each in self.components if middleware_order(each) is not None and each not in configured]
        found = [(middleware_order(each) or 0, self.definition_of(each)) for each in (*configured, *marked)]
        ordered = [definition for _, definition in sorted(found, key=lambda each: each[0]) if definition is not None]
        return [definition for definition in ordered if hasattr(definition.kind, method)]

    def _add_built_in(self) -> None:
        self._add_default("settings", AppSettings, self.built_in.settings)
        self._add_default("application_context", ApplicationContext, providers.Object(self))
        for slot, kind in _SLOTS.items():
            if slot != "broker":
                self._add_default(slot, kind, getattr(self.built_in, slot))

    def _add_default(self, name: str, kind: type, provider: providers.Provider[Any]) -> None:
        """Add a built-in object. Its name contains a dot, so no class and no parameter can have the same name."""
        replaced_by = _TEMPLATE_NAMES if kind is RocketMQTemplate else frozenset()
        self._definitions.add(
            Definition(f"mqtemplate.{name}", kind, provider, BUILT_IN, is_default=True, replaced_by=replaced_by)
        )

    def _add_override(self, kind: type, replacement: object) -> None:
        target: Any = replacement if inspect.isclass(replacement) else None
        own_kind: type = type(replacement) if target is None else target
        origin: type = get_origin(kind) or kind
        self._definitions.add(
            Definition(
                name=snake_case(origin.__name__),
                kind=own_kind if fits(own_kind, kind) else origin,  # a test double need not have the type
                alias=None if origin is kind else kind,
                provider=providers.Object(replacement) if target is None else providers.ThreadSafeSingleton(target),
                origin="override",
                target=target,
                is_owned=False,
            )
        )

    def _backs_off(self, kind: type, alias: Any) -> bool:
        """Return True if an override replaces the type, or if a starter finds an object of it."""
        if any(fits(kind, overridden, alias) for overridden in self._overrides):
            self.note(f"backed off: {name_of(kind)} is overridden")
            return True
        if self._origin == _APPLICATION:
            return False
        bases = [slot_kind for slot_kind in _SLOTS.values() if fits(kind, slot_kind)] or [alias or kind]
        for there in (definition for base in bases for definition in self._definitions.fitting(base)):
            if not there.is_default:
                self.note(f"backed off: there is {name_of(there.kind)} of {there.origin}")
                return True
        return False


class HandlerObjects:
    """Source of objects for the listeners of an application; an `ObjectSource`."""

    def __init__(self, context: ApplicationContext, wiring: Wiring) -> None:
        self._context = context
        self._wiring = wiring

    def argument(self, target: Callable[..., object], parameter: inspect.Parameter, annotation: Any) -> object:
        """Return the object for a parameter.

        Raises:
            DependencyError: No object or several have the type.
        """
        return self._wiring.object_for(target, read_parameter(target, parameter, annotation))

    def middleware(self, kind: type) -> object:
        """Return the application's object of a class of middlewares; build a new one without it."""
        definition = self._context.definition_of(kind)
        return self._context.call(kind) if definition is None else self._context.build(definition)

    def middlewares(self) -> Sequence[object]:
        """Return the middlewares of all listeners, the outermost first."""
        return [self._context.build(each) for each in self._context.middlewares("consume")]


def _kind_and_target(component: object, as_type: Any) -> tuple[type, Callable[..., object] | None, Any]:
    """Return the type by which a component is injected, what builds it, and the type with its arguments.

    The second is None for a finished object, the third for a type without known arguments.
    """
    kind, target = _type_and_target(component, as_type)
    alias = kind if get_origin(kind) is not None else None
    if alias is None and target is None and as_type is None:
        alias = getattr(component, "__orig_class__", None)  # of an object that ``Repo[Order]()`` created
    return get_origin(kind) or kind, target, alias


def _type_and_target(component: object, as_type: Any) -> tuple[Any, Callable[..., object] | None]:
    if inspect.isclass(component):
        if inspect.isabstract(component) or getattr(component, "_is_protocol", False):
            raise DependencyError(
                f"{name_of(component)} is abstract and cannot be built; give a class that implements it"
            )
        return as_type or component, component
    if inspect.iscoroutinefunction(component):
        raise DependencyError(
            f"{name_of(component)} is async, and objects are built without waiting; build it in a plain function or "
            "constructor, and open it in 'async def on_start'"
        )
    if inspect.isfunction(component):
        kind = as_type or type_hints(component).get("return")
        if not isinstance(get_origin(kind) or kind, type) or kind is type(None):
            raise DependencyError(
                f"{name_of(component)} builds an object, and its type is unknown; annotate its return type with a class"
            )
        return kind, component
    return as_type or type(component), None
