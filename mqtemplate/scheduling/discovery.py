"""Discovery of schedules: from a decorated function or object to checked schedules."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from mqtemplate.callables import name_of_callable
from mqtemplate.durations import option_ms
from mqtemplate.errors import ListenerError, ScheduleError
from mqtemplate.listener.declaration.attributes import Resolve
from mqtemplate.listener.declaration.resolution import default_resolve
from mqtemplate.listener.handler.providers import ObjectSource, Scope, compose, is_async
from mqtemplate.listener.handler.results import ResultPublisher
from mqtemplate.listener.handler.signature import ParameterReader, hints_of, signature_of
from mqtemplate.message import MessageExt
from mqtemplate.scheduling.decorator import ScheduleSpec, schedule_specs
from mqtemplate.scheduling.schedule import CatchUp, Schedule, ScheduledRun, check_name
from mqtemplate.scheduling.trigger import LAST_MS, SHORTEST_MS, Trigger, epoch_ms, read_cron, zone_of


def is_scheduled(component: object) -> bool:
    """Return True for a mark ``@scheduled`` on a function, or on a method of a class or of an object's class."""
    return next(_marked(component), None) is not None


def make_schedules(
    target: object, resolve: Resolve = default_resolve, objects: ObjectSource | None = None
) -> list[Schedule]:
    """Return the schedules of a decorated function, or of an object with decorated methods.

    Args:
        objects: Source of the objects that functions take by type; None without an application.

    Raises:
        ScheduleError: A value is not allowed, or the function takes a value that the application does not have.
    """
    schedules = []
    for name, member in _marked(target):
        handler = target if member is target else getattr(target, name)
        for number, spec in enumerate(schedule_specs(member), start=1):
            default = _default_name(member) + (f"-{number}" if number > 1 else "")
            schedules.append(_make_schedule(spec, handler, spec.name or default, resolve, objects))
    return schedules


def _marked(component: object) -> Iterator[tuple[str, Any]]:
    """Yield name and function of what is marked."""
    if not inspect.isclass(component) and schedule_specs(component):
        yield name_of_callable(component), component
    if inspect.isroutine(component) or isinstance(component, functools.partial):
        return
    seen: set[str] = set()
    for owner in inspect.getmro(component if inspect.isclass(component) else type(component)):
        for name, member in vars(owner).items():
            if name not in seen and inspect.isroutine(member) and schedule_specs(member):
                yield name, member
            seen.add(name)


def _default_name(function: Any) -> str:
    return check_name(re.sub(r"[^a-zA-Z0-9_-]", "-", name_of_callable(function)))


def _make_schedule(
    spec: ScheduleSpec, handler: Callable[..., object], name: str, resolve: Resolve, objects: ObjectSource | None
) -> Schedule:
    def text(value: Any) -> Any:
        return resolve(value).strip() if isinstance(value, str) else value

    where = f"schedule {name!r}"
    try:
        return Schedule(
            name=name,
            trigger=_in_range(_read_trigger(text(spec.cron), text(spec.every), text(spec.at), text(spec.zone))),
            catch_up=_read_catch_up(text(spec.catch_up)),
            grace_ms=_read_duration("grace", text(spec.grace), 0),
            holidays=spec.holidays,
            handler=handler,
            invoke=_invocation(handler, objects),
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
        return Trigger(every_ms=_read_duration("every", every, SHORTEST_MS), zone=zone)
    if isinstance(at, int) and not isinstance(at, bool):
        return Trigger(at_ms=at, zone=zone)
    try:
        when = datetime.fromisoformat(at) if isinstance(at, str) else at
        return Trigger(at_ms=epoch_ms(when if when.tzinfo else when.replace(tzinfo=local)), zone=zone)
    except (ValueError, TypeError, AttributeError):
        raise ScheduleError(
            f"at must be a datetime, a text such as '2026-12-24T18:00' or epoch milliseconds, got {at!r}"
        ) from None


def _in_range(trigger: Trigger) -> Trigger:
    for what, value in (("every", trigger.every_ms), ("at", trigger.at_ms)):
        if value is not None and value > LAST_MS:
            raise ScheduleError(f"{what} must be before the year 9999, got {value} ms; write nothing for 'never'")
    return trigger


def _read_duration(what: str, value: object, low_ms: int) -> int:
    found = option_ms(what, value, ScheduleError)
    if found < low_ms:
        raise ScheduleError(f"{what} must be one second or longer, got {value!r}")
    return found


def _read_catch_up(value: CatchUp | str) -> CatchUp:
    try:
        return value if isinstance(value, CatchUp) else CatchUp[value.upper()]
    except (KeyError, AttributeError):
        raise ScheduleError(f"catch_up must be 'none', 'one' or 'all', got {value!r}") from None


def _invocation(
    handler: Callable[..., object], objects: ObjectSource | None
) -> Callable[[MessageExt, ScheduledRun], object]:
    """Return the function that calls a scheduled function with the values of its parameters. They are read once."""
    parameters = signature_of(handler, "the function").parameters.values()
    hints = hints_of(handler, "the function")
    runs = [each for each in parameters if hints.get(each.name) is ScheduledRun]
    others = [each for each in parameters if each not in runs]
    if len(runs) > 1 or any(each.kind is each.POSITIONAL_ONLY for each in runs):
        raise ScheduleError(f"the function must take one ScheduledRun, by name, got {inspect.signature(handler)}")
    is_async_handler = is_async(handler)
    reader = ParameterReader("the function", is_batch=False, is_async=is_async_handler, objects=objects)
    try:
        arguments = reader.read(handler, others, "the function")
    except ListenerError as error:
        raise ScheduleError(
            f"{error}; a scheduled function takes a ScheduledRun, and what a handler takes after its payload"
        ) from error
    named_run = runs[0].name if runs else None

    def call_with_run(run: ScheduledRun, **named: object) -> object:
        return handler(**named) if named_run is None else handler(**named, **{named_run: run})

    scope = Scope(tuple(reader.providers), reader.sender)
    call = compose(call_with_run, arguments, scope, ResultPublisher("the schedule"), is_async=is_async_handler)
    return lambda message, run: call(message, [run])
