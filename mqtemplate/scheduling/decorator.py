"""``@scheduled``: functions and methods that run at times."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, TypedDict, TypeVar, Unpack

from mqtemplate.callables import name_of_callable, own_mark, refuse_bare
from mqtemplate.durations import Duration, with_unit
from mqtemplate.errors import ListenerError, ScheduleError
from mqtemplate.listener.declaration.attributes import check_handler
from mqtemplate.listener.declaration.decorator import ExceptionTypes
from mqtemplate.listener.declaration.settings import Backoff
from mqtemplate.scheduling.schedule import CatchUp, check_name
from mqtemplate.scheduling.trigger import NO_HOLIDAYS

SCHEDULED_ATTRIBUTE = "__mqtemplate_scheduled__"
"""Attribute of a decorated function that holds its tuple of `ScheduleSpec`."""

_Target = TypeVar("_Target", bound=Callable[..., object])


class RunAttributes(TypedDict, total=False):
    """Attributes of ``@message_listener`` that ``@scheduled`` takes too: a run that fails is retried like a message."""

    retry: list[Duration] | Backoff | str
    retry_for: ExceptionTypes
    not_retry_for: ExceptionTypes
    max_reconsume_times: int | str
    consume_timeout: Duration
    enabled: bool | str
    auto_startup: bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """Arguments of one ``@scheduled``. Placeholders ``${key:default}`` are not replaced yet."""

    cron: str | None
    every: Duration | None
    at: datetime | str | int | None
    zone: str
    name: str | None
    catch_up: CatchUp | str
    grace: Duration
    holidays: Container[date]
    attributes: Mapping[str, Any]


def scheduled(
    _bare: None = None,
    /,
    *,
    cron: str | None = None,
    every: Duration | None = None,
    at: datetime | str | int | None = None,
    zone: str = "UTC",
    name: str | None = None,
    catch_up: CatchUp | str = CatchUp.ONE,
    grace: Duration = "1m",
    holidays: Container[date] = NO_HOLIDAYS,
    **attributes: Unpack[RunAttributes],
) -> Callable[[_Target], _Target]:
    """Run a function, or a method of a component, at times.

    It takes the `ScheduledRun`, and what a handler of messages takes after its payload: objects of the application by
    their types, and values of functions by ``Depends``.

    Each run is a delayed message in the broker: it outlives all processes, and of several processes with the schedule
    one runs it. The function is returned unchanged. A text may hold placeholders ``${key:default}``.

    Args:
        cron: ``"0 9 * * MON-FRI"``; six fields have the second first; ``@daily`` etc.
        every: Interval, from one second: ``"10m"`` or a timedelta. It is counted from 1970 in UTC, so
            ``"10m"`` runs at :00, :10, :20 of each hour in all processes.
        at: The only run: a datetime, ISO text, or epoch ms. Without an offset it is in *zone*.
        zone: IANA time zone.
        name: Unique in its topic: letters, digits, ``_`` and ``-``. By default the function's, without its module.
        catch_up: Runs that were missed because no process was running: ``none``, ``one`` for all, or ``all``.
        grace: With ``catch_up="none"``, lateness up to which a run is not missed.
        holidays: Dates without runs: a set, or any object with ``in``, such as one of the library ``holidays``.
        attributes: See `RunAttributes`.

    Raises:
        ScheduleError: None or several of *cron*, *every* and *at* are given, or the name is not allowed.
    """
    _check_arguments(_bare, {"cron": cron, "every": every, "at": at}, name, attributes)
    spec = ScheduleSpec(
        cron=cron,
        every=with_unit("every", every),
        at=at,
        zone=zone,
        name=name,
        catch_up=catch_up,
        grace=with_unit("grace", grace),
        holidays=holidays,
        attributes=attributes,
    )

    def decorate(target: _Target) -> _Target:
        given: Any = target
        if isinstance(given, type) or not (callable(given) or isinstance(given, classmethod)):
            raise ScheduleError(
                f"@scheduled is for functions and methods, got {target!r}; put it on the method of the class"
            )
        _note(target, spec)
        return target

    return decorate


def _note(target: object, spec: ScheduleSpec) -> None:
    try:
        check_handler(target, f"@scheduled: {name_of_callable(target)}")
        setattr(target, SCHEDULED_ATTRIBUTE, (spec, *schedule_specs(target)))
    except ListenerError as error:
        raise ScheduleError(str(error)) from error
    except (AttributeError, TypeError) as error:
        raise ScheduleError(
            f"@scheduled: {name_of_callable(target)} is a {type(target).__name__}, which no decorator can mark; "
            "decorate the method inside of its class, a function that calls it, or functools.partial(it)"
        ) from error


def _check_arguments(
    bare: object, times: Mapping[str, object], name: str | None, attributes: Mapping[str, Any]
) -> None:
    refuse_bare("@scheduled", bare, "@scheduled(every='10m')", ScheduleError)
    given = [key for key, value in times.items() if value is not None]
    if len(given) != 1:
        raise ScheduleError(f"@scheduled takes one of cron=, every= and at=; got {', '.join(given) or 'none'}")
    unknown = attributes.keys() - RunAttributes.__annotations__.keys()
    if unknown:
        known = ", ".join(RunAttributes.__annotations__)
        raise TypeError(f"@scheduled has no attribute {min(unknown)!r}; beside its parameters it takes {known}")
    if name is not None:
        check_name(name)


def schedule_specs(target: object) -> tuple[ScheduleSpec, ...]:
    """Return the specs noted on this very function."""
    specs: tuple[ScheduleSpec, ...] = own_mark(target, SCHEDULED_ATTRIBUTE) or ()
    return specs
