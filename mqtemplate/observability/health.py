"""Health of an application: its broker, store, disk, listeners, lag and lateness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum

from mqtemplate.broker import Broker
from mqtemplate.converters.readable import time_text
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.listener.container.membership import ContainerState
from mqtemplate.observability.collectors import GroupLags
from mqtemplate.observability.lateness import LatenessRecorder
from mqtemplate.observability.settings import HealthSettings
from mqtemplate.user_code import error_text, is_interrupt


class Status(Enum):
    """Status of a component, in Spring's words; the first one has priority."""

    DOWN = "DOWN"
    UNKNOWN = "UNKNOWN"
    UP = "UP"


@dataclass(frozen=True, slots=True)
class ComponentHealth:
    """Health of one component.

    Attributes:
        details: Facts for an operator, as JSON has them.
    """

    status: Status
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ApplicationHealth:
    """Health of an application: the worst status of its components."""

    components: Mapping[str, ComponentHealth]

    @property
    def status(self) -> Status:
        """``DOWN`` if a component is; then ``UNKNOWN``; else ``UP``."""
        found = {component.status for component in self.components.values()}
        return next((status for status in Status if status in found), Status.UP)


Check = Callable[[], ComponentHealth]
"""Function that returns the health of one component. If it raises, the component is ``DOWN``."""


class HealthChecks:
    """The components whose health is checked, by name.

    A component that does not answer in time is ``DOWN``. Its check goes on, and is not started a second time.

    Args:
        timeout_ms: Time for all checks together.
        is_virtual: The clock is virtual: the checks run in the calling thread.
    """

    def __init__(self, checks: Mapping[str, Check], timeout_ms: int = 3_000, *, is_virtual: bool = False) -> None:
        self._checks = dict(checks)
        self._timeout_s = timeout_ms / 1_000
        self._pool = None if is_virtual else ThreadPoolExecutor(8, thread_name_prefix="mqtemplate-health")
        self._running: dict[str, object] = {}

    def add(self, name: str, check: Check) -> None:
        """Add a component of the application, or replace one."""
        self._checks[name] = check

    def read(self) -> ApplicationHealth:
        """Check all components now."""
        if self._pool is None:
            return ApplicationHealth({name: _checked(check) for name, check in self._checks.items()})
        futures = {
            name: self._pool.submit(_checked, check)
            for name, check in self._checks.items()
            if name not in self._running
        }
        answered, late = wait(futures.values(), self._timeout_s)
        for name, future in futures.items():
            if future in late:
                self._running[name] = future
                future.add_done_callback(lambda _, name=name: self._running.pop(name, None))  # type: ignore[misc]
        found = {
            name: futures[name].result() if futures.get(name) in answered else _no_answer(self._timeout_s)
            for name in self._checks
        }
        return ApplicationHealth(found)

    def close(self) -> None:
        """Start no more checks."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _checked(check: Check) -> ComponentHealth:
    try:
        return check()
    except BaseException as exc:  # of a check of the application
        if is_interrupt(exc):
            raise
        return ComponentHealth(Status.DOWN, {"error": error_text(exc)})


def _no_answer(timeout_s: float) -> ComponentHealth:
    return ComponentHealth(Status.DOWN, {"error": f"no answer in {timeout_s:g} s"})


def _below(is_below: bool, **details: object) -> ComponentHealth:
    return ComponentHealth(Status.UP if is_below else Status.DOWN, details)


def broker_checks(broker: Broker, settings: HealthSettings) -> dict[str, Check]:
    """Return the checks of a broker: ``broker``, and for an embedded one ``flush``, ``diskSpace``, ``retention``,
    and with a continuous copy ``copy``."""
    checks: dict[str, Check] = {"broker": lambda: _reachable(broker)}
    if broker.is_embedded:
        checks["flush"] = lambda: _flush(broker)
    if broker.path is not None:
        checks["diskSpace"] = lambda: _disk(broker, settings.max_disk_used_percent)
        checks["retention"] = lambda: _retention(broker)
    if broker.copy_health() is not None:
        checks["copy"] = lambda: _copy(broker)
    return checks


def _reachable(broker: Broker) -> ComponentHealth:
    found = broker.unreachable()
    errors = {name: reason for name, reason in found.items() if reason is not None}
    details: dict[str, object] = {"name": broker.name, "brokers": list(found)}
    return _below(bool(found) and not errors, **details, **({"errors": errors} if errors else {}))


def _flush(broker: Broker) -> ComponentHealth:
    store = broker.store_health()
    if store is None or store.error is not None:
        return ComponentHealth(Status.DOWN, {"error": "the store is closed" if store is None else store.error})
    return ComponentHealth(Status.UP, {"notFlushedBytes": store.not_flushed_bytes})


def _disk(broker: Broker, max_percent: int) -> ComponentHealth:
    store = broker.store_health()
    space = None if store is None else store.disk
    details: dict[str, object] = {"path": str(broker.path), "allowedPercent": max_percent}
    if store is None or space is None:
        return ComponentHealth(Status.UP, details)
    used = space.used_ratio * 100
    details |= {
        "usedPercent": round(used, 1),
        "freeBytes": space.free_bytes,
        "limitFreeBytes": space.limit_free_bytes,
        "storeBytes": space.store_bytes,
    }
    if space.full_in_ms is not None:
        details["fullInSeconds"] = space.full_in_ms // 1_000
    if store.refusal is not None:
        details["error"] = store.refusal
    is_full = used > max_percent and not space.is_roomy
    return _below(store.refusal is None and not is_full, **details)


def _retention(broker: Broker) -> ComponentHealth:
    """Return what keeps old files. It is always up: a restart, or no more requests, would not help."""
    held = [
        {
            "group": hold.group,
            "topic": hold.topic,
            "messages": hold.message_count,
            "bytes": hold.byte_count,
            "since": time_text(hold.since_ms),
        }
        for hold in broker.retention_holds()
    ]
    return ComponentHealth(Status.UP, {"heldBackBy": held} if held else {})


def _copy(broker: Broker) -> ComponentHealth:
    copy = broker.copy_health()
    if copy is None:
        return ComponentHealth(Status.DOWN, {"error": "the broker has no copy any more"})
    details: dict[str, object] = {
        "to": copy.to,
        "lagBytes": copy.lag_bytes,
        "lagMs": copy.lag_ms,
        "allowedLagMs": copy.max_lag_ms,
        "copiedUntil": time_text(copy.copied_ms),
        "lastSnapshot": time_text(copy.snapshot_ms),
        "epoch": copy.epoch,
        "owner": copy.owner,
        "leaseMs": copy.lease_ms,
        "followers": [
            {
                "process": f"process {each.pid} on {each.host}, {each.folder}",
                "seen": time_text(each.seen_ms),
                "copiedUntil": time_text(each.copied_ms),
                "isWarm": each.is_warm,
            }
            for each in copy.followers
        ],
    }
    if copy.error is not None:
        details["error"] = copy.error
    return _below(copy.lag_ms <= copy.max_lag_ms and not copy.is_refused, **details)


def listener_checks(
    listeners: Iterable[ListenerContainer], lags: GroupLags, lateness: LatenessRecorder, settings: HealthSettings
) -> dict[str, Check]:
    """Return the checks of listeners: ``listeners``, ``handlers``, ``lag`` and ``lateness``."""
    return {
        "listeners": lambda: _listeners(listeners),
        "handlers": lambda: _handlers(listeners),
        "lag": lambda: _lag(listeners, lags, settings.max_lag),
        "lateness": lambda: _lateness(lateness, settings.max_lateness_ms),
    }


def _listeners(listeners: Iterable[ListenerContainer]) -> ComponentHealth:
    """Return the states. A paused listener is up: it was paused on purpose."""
    states = {each.endpoint.id: each.state.value for each in listeners}
    wanted = [each for each in listeners if each.endpoint.settings.auto_startup]
    is_up = all(each.is_running for each in wanted) and ContainerState.BROKEN.value not in states.values()
    return _below(is_up, **states)


def _handlers(listeners: Iterable[ListenerContainer]) -> ComponentHealth:
    hanging = {each.endpoint.id: each.hanging_count for each in listeners if each.hanging_count}
    return _below(not hanging, **({"hanging": hanging} if hanging else {}))


def _lag(listeners: Iterable[ListenerContainer], lags: GroupLags, allowed: int | None) -> ComponentHealth:
    groups = {each.endpoint.settings.group for each in listeners}
    found = dict.fromkeys(sorted(groups), 0)
    for each in lags.read(listeners):
        if each.group in found:
            found[each.group] += each.lag
    return _below(allowed is None or all(lag <= allowed for lag in found.values()), groups=found, allowed=allowed)


def _lateness(lateness: LatenessRecorder, allowed_ms: int | None) -> ComponentHealth:
    worst_ms = lateness.worst_ms()
    return _below(allowed_ms is None or worst_ms <= allowed_ms, worstMs=worst_ms, allowedMs=allowed_ms)
