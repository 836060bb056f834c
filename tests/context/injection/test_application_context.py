"""Constructor injection by type: which object a parameter gets, and the errors if there is none or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Protocol

import pytest
from dependency_injector.wiring import Provide, inject
from pydantic import BaseModel

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.context import ApplicationContext, AppSettings, Section, Value, service
from mqtemplate.converter import JsonMessageConverter, MessageConverter
from mqtemplate.errors import ConfigurationError, DependencyError
from mqtemplate.template import RocketMQTemplate
from tests.context.loading import Load

if TYPE_CHECKING:
    from decimal import Decimal


def context_of(*components: object, settings: AppSettings | None = None, **overrides: object) -> ApplicationContext:
    """A linked context with a broker in memory."""
    context = ApplicationContext(settings or AppSettings())
    context.register(EmbeddedBroker(clock=VirtualClock()))
    for component in components:
        context.register(component)
    context.link()
    return context


class Store(Protocol):
    def save(self, text: str) -> None: ...


class ListStore:
    def __init__(self) -> None:
        self.saved: list[str] = []

    def save(self, text: str) -> None:
        self.saved.append(text)


class OtherStore(ListStore):
    pass


class Base(ABC):
    @abstractmethod
    def work(self) -> str: ...


class Worker(Base):
    def work(self) -> str:
        return "done"


@service
class Audit:
    def __init__(self, store: Store, worker: Base) -> None:
        self.store = store
        self.worker = worker


@dataclass
class Orders:
    template: RocketMQTemplate
    audit: Audit


# --- types ---------------------------------------------------------------------------------------


@pytest.mark.feature("C6", "B11")
def test_a_service_gets_the_template_and_other_services_by_type() -> None:
    """dependency-injector injects the template, into dataclasses too."""
    context = context_of(Orders, Audit, ListStore, Worker)

    orders = context.get(Orders)

    assert orders.template is context.get(RocketMQTemplate) is context.container.template()
    assert orders.audit is context.get(Audit)
    assert context.container.audit() is orders.audit


def test_functions_of_a_module_can_be_wired_to_the_container_of_dependency_injector() -> None:
    module = ModuleType("wired")
    module.audited = inject(lambda audit=Provide["audit"]: audit)  # type: ignore[attr-defined]
    context = context_of(Audit, ListStore, Worker)

    context.container.wire(modules=[module])

    assert module.audited() is context.get(Audit)


def test_a_parameter_of_a_protocol_or_base_class_gets_its_implementation() -> None:
    audit = context_of(Audit, ListStore, Worker).get(Audit)

    assert isinstance(audit.store, ListStore)
    assert audit.worker.work() == "done"


def test_a_class_derived_from_a_protocol_has_priority_over_one_that_merely_has_its_methods() -> None:
    class Named(Store):
        def save(self, text: str) -> None: ...

    assert isinstance(context_of(Audit, ListStore, Worker, Named).get(Audit).store, Named)


def test_the_result_of_a_function_is_injected_by_its_return_type() -> None:
    @service
    def make_store() -> ListStore:
        return ListStore()

    context = context_of(Audit, Worker, make_store)

    assert context.get(Audit).store is context.get(ListStore)


def test_an_object_is_injected_as_it_is() -> None:
    store = ListStore()

    assert context_of(Audit, Worker, store).get(Audit).store is store


def test_settings_clock_broker_and_context_can_be_injected() -> None:
    class Everything:
        def __init__(
            self, settings: AppSettings, clock: Clock, broker: EmbeddedBroker, context: ApplicationContext
        ) -> None:
            self.given = (settings, clock, broker, context)

    context = context_of(Everything)

    settings, _, broker, itself = context.get(Everything).given
    assert settings is context.settings
    assert broker is context.container.broker()
    assert itself is context


def test_a_converter_of_the_application_replaces_the_built_in_one() -> None:
    class Upper(JsonMessageConverter):
        pass

    context = context_of(Upper)

    assert type(context.get(RocketMQTemplate).converter) is Upper
    assert type(context.get(MessageConverter)) is Upper  # type: ignore[type-abstract]


def test_an_optional_parameter_needs_no_object() -> None:
    class Optional:
        def __init__(self, a: Store | None, b: Store | None = None, *, c: int = 3, d=4) -> None:  # type: ignore[no-untyped-def]
            self.given = (a, b, c, d)

    assert context_of(Optional).get(Optional).given == (None, None, 3, 4)
    assert isinstance(context_of(Optional, ListStore).get(Optional).given[0], ListStore)


def test_a_parameter_of_a_list_gets_all_objects_of_the_type() -> None:
    class All:
        def __init__(self, stores: list[ListStore], workers: Sequence[Base] = ()) -> None:
            self.stores, self.workers = stores, workers

    both = context_of(All, ListStore, OtherStore).get(All)

    assert [type(store) for store in both.stores] == [ListStore, OtherStore]
    assert both.workers == ()


# --- several objects of one type -----------------------------------------------------------------


def test_the_name_of_the_parameter_selects_one_of_several_objects() -> None:
    class Chooser:
        def __init__(self, other_store: Store, fast: Store) -> None:
            self.chosen = (type(other_store), type(fast))

    @service(name="fast")
    class Fast(ListStore):
        pass

    assert context_of(Chooser, ListStore, OtherStore, Fast).get(Chooser).chosen == (OtherStore, Fast)


def test_several_objects_without_the_name_of_the_parameter_are_an_error() -> None:
    with pytest.raises(DependencyError) as refused:
        context_of(Audit, ListStore, OtherStore, Worker)

    assert str(refused.value) == (
        "Audit: parameter 'store': 2 objects are a Store: ListStore (list_store), OtherStore (other_store); "
        "choose one by naming the parameter after it, or give one another name by @service(name=...)"
    )


def test_two_objects_with_one_name_are_refused() -> None:
    class Audit:
        pass

    with pytest.raises(DependencyError, match=r"the name 'audit' is taken by Audit of application"):
        context_of(Audit, globals()["Audit"])


def test_a_class_with_the_name_of_a_built_in_object_does_not_replace_it() -> None:
    class Settings:
        pass

    class Template:
        pass

    context = context_of(Settings, Template)

    assert isinstance(context.get(AppSettings), AppSettings)
    assert isinstance(context.container.template(), RocketMQTemplate)


# --- errors --------------------------------------------------------------------------------------


def test_the_error_for_a_missing_object_names_class_parameter_type_and_the_existing_objects() -> None:
    with pytest.raises(DependencyError) as refused:
        context_of(Audit, Worker)

    text = str(refused.value)
    assert text.startswith("Audit: parameter 'store' needs Store, and no object here is one (there is: AppSettings, ")
    assert "Worker (worker)" in text
    assert text.endswith(
        "mark the class with @service and give it to MQApplication, or call context.register(...) with an object"
    )


def test_a_missing_object_is_reported_before_any_object_is_built() -> None:
    built: list[str] = []

    class Early:
        def __init__(self) -> None:
            built.append("early")

    with pytest.raises(DependencyError):
        context_of(Early, Audit)
    assert built == []


class Chicken:
    def __init__(self, egg: Egg) -> None: ...


class Egg:
    def __init__(self, nest: Nest) -> None: ...


class Nest:
    def __init__(self, hen: Chicken) -> None: ...


class Farm:
    def __init__(self, egg: Egg) -> None: ...


def test_the_error_for_a_circle_shows_it() -> None:
    with pytest.raises(DependencyError) as refused:
        context_of(Farm, Chicken, Egg, Nest)

    assert "these need each other to be built: Egg(nest) -> Nest(hen) -> Chicken(egg) -> Egg; break" in str(
        refused.value
    )


def test_the_error_for_a_circle_through_the_template_shows_it() -> None:
    """A converter that needs the template, which needs the converter."""

    class Circular(JsonMessageConverter):
        def __init__(self, template: RocketMQTemplate) -> None: ...

    with pytest.raises(DependencyError, match=r"RocketMQTemplate -> Circular\(template\) -> RocketMQTemplate"):
        context_of(Circular)


@pytest.mark.parametrize("plain", ["str", "int", "dict"])
def test_plain_values_are_not_injected_by_type(plain: str) -> None:
    class Plain:
        def __init__(self, name) -> None: ...  # type: ignore[no-untyped-def]

    Plain.__init__.__annotations__["name"] = plain

    with pytest.raises(
        DependencyError, match=rf"parameter 'name' needs a plain {plain}.*write Annotated\[{plain}, Value"
    ):
        context_of(Plain)


def test_a_parameter_without_a_type_is_refused() -> None:
    class Untyped:
        def __init__(self, thing) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(DependencyError, match="parameter 'thing' has no type annotation"):
        context_of(Untyped)


def test_the_error_for_a_type_known_to_the_type_checker_only_names_it() -> None:
    class Typed:
        def __init__(self, amount: Decimal) -> None: ...

    with pytest.raises(DependencyError, match="name 'Decimal', which is not known at run time; import it outside"):
        context_of(Typed)


def test_a_class_defined_in_a_function_is_found_by_its_name() -> None:
    class Inner:
        pass

    class Outer:
        def __init__(self, inner: Inner) -> None:
            self.inner = inner

    context = context_of(Inner, Outer)

    assert context.get(Outer).inner is context.get(Inner)


def test_markers_of_dependency_injector_are_refused() -> None:
    """The service would get the marker instead of a store."""

    class Marked:
        def __init__(self, store: Store = Provide["store"]) -> None: ...

    class MarkedInAnnotation:
        def __init__(self, store: Annotated[Store, Provide["store"]]) -> None: ...

    for marked in (Marked, MarkedInAnnotation):
        with pytest.raises(DependencyError, match="parameter 'store' carries a marker of dependency-injector"):
            context_of(marked, ListStore)


def test_inject_on_a_class_is_refused() -> None:
    """It turns the class into a function."""

    class Marked:
        def __init__(self, store: Store = Provide["store"]) -> None: ...

    with pytest.raises(DependencyError, match=r"Marked is a class that @inject turned into a function; remove @inject"):
        service(inject(Marked))


def test_abstract_classes_and_functions_without_a_return_type_are_refused() -> None:
    def nothing() -> None: ...

    for component, problem in [
        (Base, "Base is abstract and cannot be built"),
        (Store, "Store is abstract and cannot be built"),
        (service(nothing), "annotate its return type with a class"),
    ]:
        with pytest.raises(DependencyError, match=problem):
            context_of(component)
    with pytest.raises(DependencyError, match="@service needs a class, or a function"):
        service(3)  # type: ignore[type-var]


def test_the_error_for_a_constructor_that_raises_names_the_class() -> None:
    class Broken:
        def __init__(self) -> None:
            raise ValueError("no luck")

    with pytest.raises(DependencyError, match="Broken could not be built: ValueError: no luck") as refused:
        context_of(Broken).get(Broken)
    assert isinstance(refused.value.__cause__, ValueError)


def test_the_error_of_get_names_the_existing_objects() -> None:
    with pytest.raises(DependencyError, match=r"no object here is a Audit \(there is: .*EmbeddedBroker"):
        context_of().get(Audit)


def test_nothing_can_be_registered_after_the_link() -> None:
    with pytest.raises(DependencyError, match="the context is complete"):
        context_of().register(ListStore)


def test_the_error_without_a_broker_says_what_to_do() -> None:
    with pytest.raises(DependencyError, match=r"there is no Broker: .*mqtemplate\.embedded\.enabled"):
        ApplicationContext(AppSettings()).link()


# --- values from the configuration ---------------------------------------------------------------


class Limits(BaseModel):
    per_day: int


class Configured:
    def __init__(
        self,
        name: Annotated[str, Value("${shop.name:none}")],
        limit: Annotated[int, Value("${shop.limit:10}")],
        limits: Annotated[Limits, Section("shop.limits")],
        colours: Annotated[list[str], Value("${shop.colours}")],
    ) -> None:
        self.given = (name, limit, limits.per_day, colours)


def test_values_and_sections_come_from_the_configuration(load: Load) -> None:
    settings = load("shop:\n  limit: '7'\n  limits: {perDay: 3}\n  colours: [red, blue]")

    assert context_of(Configured, settings=settings).get(Configured).given == ("none", 7, 3, ["red", "blue"])


def test_the_error_for_a_value_of_the_wrong_type_names_class_and_parameter(load: Load) -> None:
    settings = load("shop:\n  limit: many\n  limits: {perDay: 3}\n  colours: [red]")

    with pytest.raises(
        DependencyError, match=r"Configured: parameter 'limit': the value of '\$\{shop.limit:10\}' is not of type int"
    ):
        context_of(Configured, settings=settings)


def test_the_error_for_a_missing_value_names_class_and_parameter(load: Load) -> None:
    with pytest.raises(ConfigurationError, match=r"Configured: parameter 'colours': '\$\{shop.colours\}' has no value"):
        context_of(Configured, settings=load("shop.limits.per-day: 3"))


# --- overrides -----------------------------------------------------------------------------------


def overridden(*components: object, **kwargs: dict[type, object]) -> ApplicationContext:
    context = ApplicationContext(AppSettings(), kwargs["overrides"])
    for component in components:
        context.register(component)
    context.link()
    return context


def test_an_override_replaces_everything_of_its_type() -> None:
    """Dependencies of the replaced class are not needed any more."""
    fake = ListStore()
    broker = EmbeddedBroker(clock=VirtualClock())

    class ReplacedStore(OtherStore):
        def __init__(self, worker: Base) -> None: ...

    context = overridden(Audit, Worker, ReplacedStore, overrides={Store: fake, EmbeddedBroker: broker})

    assert context.get(Audit).store is fake
    assert context.get(RocketMQTemplate).broker is broker


def test_an_override_may_be_a_class_to_build() -> None:
    class Fake(Audit):
        def __init__(self, worker: Base) -> None:
            self.worker = worker

    broker = EmbeddedBroker(clock=VirtualClock())

    context = overridden(Audit, Worker, overrides={Audit: Fake, EmbeddedBroker: broker})

    assert isinstance(context.get(Audit), Fake)
