"""Discovery of schedules: from a decorated function or object to checked schedules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, get_type_hints

from mqtemplate.durations import duration_ms
from mqtemplate.errors import ScheduleError
from mqtemplate.listener.attributes import Resolve
from mqtemplate.listener.resolution import default_resolve
from mqtemplate.scheduling.cron import read_cron
from mqtemplate.scheduling.decorator import ScheduleSpec, schedule_specs
from mqtemplate.scheduling.run import ScheduledRun
from mqtemplate.scheduling.schedule import CatchUp, Schedule, check_name
from mqtemplate.scheduling.trigger import Trigger, epoch_ms, zone_of


def is_scheduled(component: object) -> bool:
    """Return True for a mark ``@scheduled`` on a function, or on a method of a class or of an object's class."""
    return next(_marked(component), None) is not None


def make_schedules(target: object, resolve: Resolve = default_resolve) -> list[Schedule]:
    """Return the schedules of a decorated function, or of an object with decorated methods.

    Raises:
        ScheduleError: A value is not allowed, or the function takes something else than a run.
    """
    schedules = []
    for name, member in _marked(target):
        handler = member if inspect.isroutine(target) else getattr(target, name)
        for number, spec in enumerate(schedule_specs(member), start=1):
            default = _default_name(member) + (f"-{number}" if number > 1 else "")
            schedules.append(_make_schedule(spec, handler, spec.name or default, resolve))
    return schedules


def _marked(component: object) -> Iterator[tuple[str, Any]]:
    """Yield name and function of what is marked."""
    if inspect.isroutine(component):
        if schedule_specs(component):
            yield component.__name__, component
        return
    seen: set[str] = set()
    for owner in inspect.getmro(component if inspect.isclass(component) else type(component)):
        for name, member in vars(owner).items():
            if name not in seen and inspect.isroutine(member) and schedule_specs(member):
                yield name, member
            seen.add(name)


def _default_name(function: Any) -> str:
    qualname = function.__qualname__.rpartition("<locals>.")[2]
    return check_name(re.sub(r"[^a-zA-Z0-9_-]", "-", qualname))


def _make_schedule(spec: ScheduleSpec, handler: Callable[..., object], name: str, resolve: Resolve) -> Schedule:
    def text(value: Any) -> Any:
        return resolve(value).strip() if isinstance(value, str) else value

    where = f"schedule {name!r}"
    try:
        return Schedule(
            name=name,
            trigger=_read_trigger(text(spec.cron), text(spec.every), text(spec.at), text(spec.zone)),
            catch_up=_read_catch_up(text(spec.catch_up)),
            grace_ms=_read_duration("grace", text(spec.grace), 0),
            holidays=spec.holidays,
            handler=handler,
            run_parameter=_run_parameter(handler),
            attributes=spec.attributes,
        )
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from error


def _read_trigger(cron: Any, every: Any, at: Any, zone: str) -> Trigger:
    local = zone_of(zone)
    if cron is not None:
        try:
            return Trigger(cron=read_cron(cron), zone=zone)
        except ValueError as error:
            raise ScheduleError(f"cron must be {error}") from None
    if every is not None:
        return Trigger(every_ms=_read_duration("every", every, 1_000), zone=zone)
    if isinstance(at, int) and not isinstance(at, bool):
        return Trigger(at_ms=at, zone=zone)
    try:
        when = datetime.fromisoformat(at) if isinstance(at, str) else at
        return Trigger(at_ms=epoch_ms(when if when.tzinfo else when.replace(tzinfo=local)), zone=zone)
    except (ValueError, TypeError, AttributeError):
        raise ScheduleError(
            f"at must be a datetime, a text such as '2026-12-24T18:00' or epoch milliseconds, got {at!r}"
        ) from None


def _read_duration(what: str, value: object, low_ms: int) -> int:
    try:
        found = duration_ms(value, 1_000)
    except ValueError as error:
        raise ScheduleError(f"{what} must be {error}") from None
    if found < low_ms:
        raise ScheduleError(f"{what} must be one second or longer, got {value!r}")
    return found


def _read_catch_up(value: CatchUp | str) -> CatchUp:
    try:
        return value if isinstance(value, CatchUp) else CatchUp[value.upper()]
    except (KeyError, AttributeError):
        raise ScheduleError(f"catch_up must be 'none', 'one' or 'all', got {value!r}") from None


def _run_parameter(handler: Callable[..., object]) -> str | None:
    """Return the name of the parameter for the run; None if the function takes nothing."""
    hints = get_type_hints(handler)
    chosen = None
    for parameter in inspect.signature(handler).parameters.values():
        if hints.get(parameter.name) is ScheduledRun and parameter.kind is not parameter.POSITIONAL_ONLY:
            chosen = parameter.name
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ScheduleError(
                f"the function takes {parameter.name!r}; a scheduled function takes nothing, or one parameter "
                "annotated ScheduledRun"
            )
    return chosen
