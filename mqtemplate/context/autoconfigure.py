"""Starters: packages that add objects to an application, and the report of what each one did."""

from __future__ import annotations

import graphlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from mqtemplate.broker import Broker
from mqtemplate.clock import Clock
from mqtemplate.context.config.masking import masked
from mqtemplate.context.injection.application_context import ApplicationContext, BrokerFactory, ConditionOutcome
from mqtemplate.context.injection.wiring import snake_case
from mqtemplate.context.settings.app import HAND_OVER, AppSettings
from mqtemplate.context.settings.clients import settings_of_old_broker
from mqtemplate.errors import ConfigurationError
from mqtemplate.user_code import did_you_mean

if TYPE_CHECKING:
    from mqtemplate.handover.broker import HandOverBroker

GROUP = "mqtemplate.autoconfigure"
"""Entry-point group in which a distribution names its starters."""


class AutoConfiguration(ABC):
    """Base class of starters: the condition under which a starter acts, and what it adds.

    The module that an entry point names imports only the standard library and mqtemplate. `contribute` imports the
    library that the starter is for, which is known to be installed then.

    Attributes:
        requires: Modules that must be installed; the check does not import them.
        after: Names of starters that act earlier, if they are installed.
    """

    requires: ClassVar[Sequence[str]] = ()
    after: ClassVar[Sequence[str]] = ()

    def condition(self, settings: AppSettings) -> bool | str:
        """Return True to act; else False, or better the reason as text."""
        return True

    def broker_factory(self, settings: AppSettings) -> BrokerFactory | None:
        """Return the function that creates the broker which the settings choose; None if the starter has none for them.

        The application calls it for the brokers of further templates and of listeners, whether `condition` holds or
        not. The function has an annotated return type, and starts nothing.

        Raises:
            UnsupportedError: A key is set that the broker does not support.
        """
        return None

    @abstractmethod
    def contribute(self, context: ApplicationContext) -> None:
        """Register objects. ``context.register`` backs off for objects of the application."""


def register_broker(context: ApplicationContext, factory: BrokerFactory) -> bool:
    """Register the broker that a starter creates as the application's own. Return False if there is one.

    With ``mqtemplate.hand-over.from`` it is that broker and the old one together.
    """
    if context.settings.mqtemplate.hand_over.from_ is None:
        return context.register(factory, name="broker")
    from mqtemplate.handover.broker import HandOverBroker

    def hand_over_broker(settings: AppSettings, clock: Clock) -> HandOverBroker:
        return _hand_over_broker(context, factory(settings, clock))

    return context.register(hand_over_broker, as_type=HandOverBroker, name="broker")


def _hand_over_broker(context: ApplicationContext, new: Broker) -> HandOverBroker:
    from mqtemplate.handover.broker import HandOverBroker, HandOverOptions
    from mqtemplate.handover.limits import MoverSettings

    settings, given = context.settings, context.settings.mqtemplate.hand_over
    of_old = settings_of_old_broker(settings)
    factories = (factory for find in context.broker_factories if (factory := find(of_old)) is not None)
    create_old = next(factories, None)
    if create_old is None:
        raise ConfigurationError(
            f"{settings.origins.of(f'{HAND_OVER}.from')}: {HAND_OVER}.from is {masked(given.from_)!r}, and no starter "
            "creates that broker; remove its starter's name from mqtemplate.autoconfigure.exclude"
        )
    options = HandOverOptions(
        target=settings.rocketmq.name_server,
        origin=f"{HAND_OVER}.from: {masked(given.from_)}",
        mover=MoverSettings(rate=given.rate, max_early_ms=given.max_early_ms),
        orderly_waits_for_pending=given.orderly_waits_for == "PENDING",
        allow_other_queue_count=given.allow_other_queue_count,
    )
    return HandOverBroker(create_old(of_old, new.clock), new, options)


StarterSource: TypeAlias = EntryPoint | type[AutoConfiguration] | AutoConfiguration


def find_starters(given: Iterable[StarterSource] | None = None) -> dict[str, AutoConfiguration]:
    """Return the starters of all installed distributions, or those *given*, by name.

    The name of the entry point names the starter; without one, the name of ``MyAutoConfiguration`` is ``my``.

    Raises:
        ConfigurationError: A starter cannot be loaded, is not an `AutoConfiguration`, or two have the same name.
    """
    starters: dict[str, AutoConfiguration] = {}
    for source in _installed(_state_of_path()) if given is None else given:
        name, starter = _load(source)
        if name in starters:
            raise ConfigurationError(f"two starters are called {name!r}; uninstall one, or rename its entry point")
        starters[name] = starter
    return starters


def _state_of_path() -> tuple[tuple[int, int] | None, ...]:
    """Return what changes when a distribution is installed, or when the import path is another one."""
    return tuple(_state_of_folder(Path(folder)) for folder in sys.path)


def _state_of_folder(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:  # a part of the path may be missing
        return None
    return status.st_ino, status.st_mtime_ns


@lru_cache(maxsize=1)
def _installed(_state: Sequence[object]) -> tuple[EntryPoint, ...]:
    """Return the starters of all distributions. It reads a file of each one, which took a seventh of a short test."""
    return tuple(entry_points(group=GROUP))


def apply_starters(starters: Mapping[str, AutoConfiguration], context: ApplicationContext) -> None:
    """Run each starter whose condition holds, in the order of ``after``, and add the outcomes to the context.

    Raises:
        ConfigurationError: ``mqtemplate.autoconfigure.exclude`` names an unknown starter, or the order has a circle.
    """
    excluded = context.settings.mqtemplate.autoconfigure.exclude
    _check_excluded(excluded, sorted(starters), context.settings)
    for name in _in_order(starters):
        if name not in excluded and not _missing(starters[name]):
            context.broker_factories.append(starters[name].broker_factory)
        context.conditions.append(_apply(name, starters[name], name in excluded, context))


def _load(source: StarterSource) -> tuple[str, AutoConfiguration]:
    if not isinstance(source, EntryPoint):
        configuration = source() if isinstance(source, type) else source
        name = snake_case(type(configuration).__name__).removesuffix("_auto_configuration")
        return name, configuration
    try:
        loaded = source.load()
    except Exception as exc:
        raise ConfigurationError(
            f"{_described(source)} cannot be loaded: {type(exc).__name__}: {exc}; repair or uninstall the package that "
            "brings it"
        ) from exc
    configuration = loaded() if isinstance(loaded, type) else loaded
    if not isinstance(configuration, AutoConfiguration):
        raise ConfigurationError(
            f"{_described(source)} is not an AutoConfiguration; derive it from mqtemplate.context.AutoConfiguration"
        )
    return source.name, configuration


def _described(source: EntryPoint) -> str:
    """Return a starter as errors name it. The name of its distribution is in a file that has its whole README, too."""
    return f"starter {source.name!r} ({source.value}{f', of {source.dist.name}' if source.dist else ''})"


def _in_order(starters: Mapping[str, AutoConfiguration]) -> list[str]:
    after = {name: [other for other in starters[name].after if other in starters] for name in sorted(starters)}
    try:
        return list(graphlib.TopologicalSorter(after).static_order())
    except graphlib.CycleError as exc:
        chain = " -> ".join(reversed(exc.args[1]))
        raise ConfigurationError(
            f"starters wait for each other: {chain} (each is 'after' the next); drop one 'after'"
        ) from exc


def _check_excluded(excluded: Sequence[str], names: Sequence[str], settings: AppSettings) -> None:
    for name in excluded:
        if name not in names:
            hint = did_you_mean(name, names, f"there is: {', '.join(names) or 'none'}")
            key = "mqtemplate.autoconfigure.exclude"
            raise ConfigurationError(f"{settings.origins.of(key)}: {key}: there is no starter {name!r}; {hint}")


def _apply(name: str, starter: AutoConfiguration, is_excluded: bool, context: ApplicationContext) -> ConditionOutcome:
    if is_excluded:
        return ConditionOutcome(name, False, "excluded by mqtemplate.autoconfigure.exclude")
    missing = _missing(starter)
    if missing:
        return ConditionOutcome(name, False, f"not installed: {', '.join(missing)}", is_installed=False)
    verdict = starter.condition(context.settings)
    if verdict is not True:
        return ConditionOutcome(name, False, verdict or "its condition does not hold")
    with context.contributions(f"starter {name}") as notes:
        starter.contribute(context)
    return ConditionOutcome(name, True, "; ".join(notes) or "acted")


def _missing(starter: AutoConfiguration) -> list[str]:
    return [module for module in starter.requires if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False
