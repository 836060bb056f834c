"""Cancelling and rescheduling the pending messages of a DataFrame."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING

from mqtemplate.broker import Broker
from mqtemplate.durations import Duration, option_ms
from mqtemplate.errors import ConfigurationError, DelayError, MQTemplateError
from mqtemplate.pending import ScheduleChange
from mqtemplate.spark.location.location import BrokerLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_AT_ONCE = 256


_Changed = tuple[str, str, str | None]
"""Result for one row: handle, status, and for ``ERROR`` a reason."""


def cancel_pending(
    rows: DataFrame,
    *,
    store: str | None = None,
    name_server: str | None = None,
    client_file: str | None = None,
    address_map: Mapping[str, str] | None = None,
    broker: Broker | None = None,
) -> DataFrame:
    """Cancel the pending messages with the handles of a DataFrame, and return the result of each row.

    The changes are done when the function returns: they are not lazy, as Spark's operations are.

    Args:
        rows: Has the column ``handle``, as ``view=pending`` and `SendResult.handle` have it.
        store: Folder of an embedded broker; or *name_server* of a cluster, or a *broker* of this process.
        client_file: File with access key and TLS settings for the cluster; None for the environment.
        address_map: Addresses that its brokers register -> those at which this machine reaches them.

    Returns:
        ``handle``, ``status`` (``CANCELLED``, ``ALREADY_DELIVERED``, ``MOVED``, ``UNKNOWN`` or ``ERROR``) and
        ``reason``.

    Raises:
        ConfigurationError: A column or the broker is missing.
    """
    _check_columns(rows, "handle")
    handles = [handle for handle in rows.select("handle").toArrow()["handle"].to_pylist() if handle is not None]
    with _opened(broker, store, name_server, client_file, address_map) as delayed:
        changed = [each for part in _parts(handles) for each in _change(part, delayed.delayed.cancel)]
    return _frame(rows, changed)


def reschedule_pending(
    rows: DataFrame,
    *,
    delay: Duration | None = None,
    store: str | None = None,
    name_server: str | None = None,
    client_file: str | None = None,
    address_map: Mapping[str, str] | None = None,
    broker: Broker | None = None,
) -> DataFrame:
    """Change the deliver time of the pending messages of a DataFrame, and return the result of each row.

    Args:
        rows: Has the column ``handle``; and ``newDeliverTime`` (timestamp), unless *delay* is given.
        delay: Delay of all messages, ``"3h"`` or a timedelta, counted from now.

    Returns:
        As `cancel_pending`, with the status ``RESCHEDULED``. The view lists the new handles.
    """
    _check_columns(rows, "handle", *(() if delay is not None else ("newDeliverTime",)))
    delay_ms = 0 if delay is None else option_ms("delay", delay, DelayError)
    with _opened(broker, store, name_server, client_file, address_map) as delayed:
        times = _deliver_times(rows, None if delay is None else delayed.clock.now_ms() + delay_ms)
        changed = [
            each
            for deliver_ms, group in groupby(sorted(times), key=lambda each: each[0])
            for part in _parts([handle for _, handle in group])
            for each in _change(part, lambda text, at=deliver_ms: delayed.delayed.reschedule(text, at))  # type: ignore[misc]
        ]
    return _frame(rows, changed)


def _deliver_times(rows: DataFrame, deliver_ms: int | None) -> list[tuple[int, str]]:
    from pyspark.sql import functions as f

    time = f.lit(deliver_ms) if deliver_ms is not None else f.unix_millis("newDeliverTime")
    table = rows.select("handle", time.cast("bigint").alias("deliver_ms")).dropna().toArrow()
    return list(zip(table["deliver_ms"].to_pylist(), table["handle"].to_pylist(), strict=True))


def _check_columns(rows: DataFrame, *names: str) -> None:
    missing = [name for name in names if name not in rows.columns]
    if missing:
        raise ConfigurationError(
            f"the DataFrame lacks {', '.join(missing)}; it has {', '.join(rows.columns)}. The view has the column "
            "'handle': spark.read.format('mqtemplate').option('view', 'pending')"
        )


@contextmanager
def _opened(
    broker: Broker | None,
    store: str | None,
    name_server: str | None,
    client_file: str | None,
    address_map: Mapping[str, str] | None,
) -> Iterator[Broker]:
    if broker is not None:
        if store is not None or name_server is not None:
            raise ConfigurationError("give one of 'broker', 'store' and 'name_server'")
        yield broker
        return
    entries = json.dumps(dict(address_map)) if address_map else None
    given = {"store": store, "nameServer": name_server, "clientFile": client_file, "addressMap": entries}
    location = BrokerLocation.of_options({name: value for name, value in given.items() if value is not None})
    # By name: clients and brokers load only where one is used.
    connection = import_module("mqtemplate.spark.location.connection")
    with connection.open_broker(location) as opened:
        yield opened


def _parts(handles: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(handles), _AT_ONCE):
        yield handles[start : start + _AT_ONCE]


def _change(handles: Sequence[str], change: Callable[[str], ScheduleChange]) -> list[_Changed]:
    """Change all of them with one request; if some could not be changed, request the state of each."""
    try:
        result = change(",".join(handles))
    except MQTemplateError as exc:
        if len(handles) == 1:
            return [(handles[0], "ERROR", str(exc))]
    else:
        if len(handles) in (1, result.count):
            return [(handle, result.status.name, None) for handle in handles]
    return [each for handle in handles for each in _change([handle], change)]


def _frame(rows: DataFrame, changed: list[_Changed]) -> DataFrame:
    return rows.sparkSession.createDataFrame(changed, "handle string, status string, reason string")
