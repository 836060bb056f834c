"""What administrators ask of the broker as a whole: how it is, what it was told, and what it is to be told now.

Source: RocketMQ ``broker: AdminBrokerProcessor``; section 18.3 of the specification has the names that tools read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import ClassVar

import structlog

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import Clock
from mqtemplate.errors import ConfigurationError, CorruptRecordError
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.route import KVTable
from mqtemplate.remoting.protocol.codes import CURRENT_VERSION
from mqtemplate.remoting.protocol.headers.admin import GetBrokerConfigResponseHeader, ViewBrokerStatsDataRequestHeader
from mqtemplate.remoting.server import Processor
from mqtemplate.server.admin.traffic import DayTotals, Traffic
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings

_log = structlog.stdlib.get_logger("mqtemplate.admin")

_CHANGEABLE = "messageDelayLevel"


class BrokerAdmin:
    """Answers about the broker.

    Args:
        address: Where clients reach it.

    Attributes:
        slow: Codes whose answers look at the disk.
    """

    slow: ClassVar[frozenset[int]] = frozenset({RequestCode.GET_BROKER_RUNTIME_INFO, RequestCode.UPDATE_BROKER_CONFIG})

    def __init__(
        self,
        engine: EmbeddedBroker,
        settings: BrokerServerSettings,
        traffic: Traffic,
        address: Callable[[], str],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._traffic = traffic
        self._address = address
        self._clock: Clock = engine.clock
        self._boot_ms = self._clock.now_ms()

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.GET_BROKER_RUNTIME_INFO: self._runtime_info,
            RequestCode.GET_BROKER_CONFIG: self._config,
            RequestCode.UPDATE_BROKER_CONFIG: self._update_config,
            RequestCode.VIEW_BROKER_STATS_DATA: self._stats,
        }

    # --- how it is -----------------------------------------------------------------------------

    def _runtime_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return request.response(body=KVTable(table=dict(sorted(self.runtime_info().items()))).encode())

    def runtime_info(self) -> dict[str, str]:
        """The figures that tools show, under the names they know. There are no thread pools here to tell of: the
        queues before them are empty, and nobody waits at their heads.
        """
        return {
            "brokerActive": "true",
            "brokerVersion": str(int(CURRENT_VERSION)),
            "brokerVersionDesc": _version_text(CURRENT_VERSION),
            "bootTimestamp": str(self._boot_ms),
            "startAcceptSendRequestTimeStamp": str(self._boot_ms),
            "runtime": _span_text(self._clock.now_ms() - self._boot_ms),
            "putTps": _rates_text(self._traffic.rates_in()),
            "getTransferredTps": _rates_text(self._traffic.rates_out()),
            "getTotalTps": _rates_text(self._traffic.rates_out()),
            "getFoundTps": _rates_text(self._traffic.rates_out()),
            "getMissTps": _rates_text((0.0, 0.0, 0.0)),
            **_day_totals("msgPutTotal", self._traffic.total_in()),
            **_day_totals("msgGetTotal", self._traffic.total_out()),
            **self._store_info(),
            **_pools(),
        }

    def _store_info(self) -> dict[str, str]:
        store = self._engine.store
        return {
            "commitLogMinOffset": str(store.start_offset),
            "commitLogMaxOffset": str(store.end_offset),
            "remainHowManyDataToFlush": f"{max(store.end_offset - store.confirm_offset, 0)} B",
            "dispatchBehindBytes": "0",
            "pageCacheLockTimeMills": "0",
            "earliestMessageTimeStamp": str(self._earliest_ms()),
            "timerReadBehind": "0",
            "timerOffsetBehind": "0",
            "timerCongestNum": "0",
            "timerEnqueueTps": "0.0",
            "timerDequeueTps": "0.0",
            **self._disk_info(),
        }

    def _disk_info(self) -> dict[str, str]:
        ratio = f"{self._engine.store.store_files.disk_used_ratio():.4f}"
        info = {"commitLogDiskRatio": ratio, "consumeQueueDiskRatio": ratio}
        if self._engine.path is not None:
            usage = shutil.disk_usage(self._engine.path)
            info["commitLogDirCapacity"] = f"Total : {_bytes_text(usage.total)}, Free : {_bytes_text(usage.free)}."
        return info

    def _earliest_ms(self) -> int:
        """When the first message that is still there was stored; -1 of an empty log."""
        store = self._engine.store
        try:
            record = store.read_at(store.start_offset) if store.start_offset < store.confirm_offset else None
        except CorruptRecordError:
            return -1
        return -1 if record is None else record.store_timestamp

    def _stats(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(ViewBrokerStatsDataRequestHeader)
        if asked.stats_name == "TOPIC_PUT_NUMS":
            found = self._traffic.topic_stats(asked.stats_key)
        elif asked.stats_name == "GROUP_GET_NUMS":
            topic, _, group = asked.stats_key.rpartition("@")
            found = self._traffic.group_stats(group, topic)
        else:
            found = None
        if found is None:
            remark = f"there are no figures {asked.stats_name!r} of {asked.stats_key!r}"
            return request.response(ResponseCode.SYSTEM_ERROR, remark=remark)
        return request.response(body=found.encode())

    # --- what it was told ----------------------------------------------------------------------

    def _config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        text = "".join(f"{name}={value}\n" for name, value in sorted(self.config().items()))
        version = json.dumps({"counter": 0, "stateVersion": 0, "timestamp": self._boot_ms})
        return request.response(header=GetBrokerConfigResponseHeader(version=version), body=text.encode())

    def config(self) -> dict[str, str]:
        """The settings by RocketMQ's names. None of them is secret."""
        engine, server = self._engine.settings, self._settings
        ip, _, port = self._address().rpartition(":")
        values: dict[str, object] = {
            "brokerClusterName": server.cluster_name,
            "brokerName": self._engine.name,
            "brokerId": 0,
            "brokerIP1": ip,
            "listenPort": port,
            "brokerPermission": 6,
            "brokerRole": "ASYNC_MASTER",
            "autoCreateTopicEnable": server.auto_create_topic_enable,
            "autoCreateSubscriptionGroup": server.auto_create_subscription_group,
            "defaultTopicQueueNums": server.default_topic_queue_nums,
            "enablePropertyFilter": server.enable_property_filter,
            "recallMessageEnable": server.recall_message_enable,
            "regionId": server.region_id,
            "storePathRootDir": self._engine.path or "memory",
            "flushDiskType": engine.flush_disk_type.value,
            "flushConsumerOffsetInterval": engine.flush_consumer_offset_interval_ms,
            "mappedFileSizeCommitLog": engine.mapped_file_size_commit_log,
            "mappedFileSizeConsumeQueue": engine.mapped_file_size_consume_queue,
            "mappedFileSizeTimerLog": engine.mapped_file_size_timer_log,
            "maxHashSlotNum": engine.max_hash_slot_num,
            "maxIndexNum": engine.max_index_num,
            "maxMessageSize": engine.max_message_size,
            _CHANGEABLE: self._engine.levels.text,
            "timerWheelEnable": engine.timer_wheel_enable,
            "timerPrecisionMs": engine.timer_precision_ms,
            "timerMaxDelaySec": engine.timer_max_delay_sec,
            "timerRollWindowSlot": engine.timer_roll_window_slot,
            "fileReservedTime": engine.file_reserved_time,
            "deleteWhen": engine.delete_when,
            "diskMaxUsedSpaceRatio": engine.disk_max_used_space_ratio,
        }
        return {name: _text(value) for name, value in values.items()}

    def _update_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Take over what can be changed while it runs; all of it or nothing."""
        wanted = _properties(request.body.decode("utf-8", "replace"))
        known = self.config()
        fixed = [name for name, value in wanted.items() if name != _CHANGEABLE and known.get(name) != value]
        if fixed:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"{', '.join(fixed)} cannot be changed while the broker runs, only {_CHANGEABLE} can; set it in "
                "application.yml and start again",
            )
        if _CHANGEABLE in wanted:
            try:
                self._engine.change_delay_levels(wanted[_CHANGEABLE])
            except ConfigurationError as exc:
                raise RefusedError(ResponseCode.INVALID_PARAMETER, str(exc)) from exc
        _log.info("admin.config_updated", names=sorted(wanted), by=str(connection.remote))
        return request.response()


def _properties(text: str) -> dict[str, str]:
    """Lines of ``name=value``, as Java's properties have them."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith(("#", "!"))]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _version_text(number: int) -> str:
    return Version(number).name if number in set(Version) else str(number)


def _rates_text(rates: tuple[float, float, float]) -> str:
    return " ".join(str(round(rate, 4)) for rate in rates)


def _day_totals(name: str, totals: DayTotals) -> dict[str, str]:
    return {
        f"{name}YesterdayMorning": str(totals.yesterday_morning),
        f"{name}TodayMorning": str(totals.today_morning),
        f"{name}TodayNow": str(totals.now),
    }


def _pools() -> dict[str, str]:
    return {
        f"{name}ThreadPoolQueue{figure}": "0"
        for name in ("send", "pull", "query", "litePull", "ack")
        for figure in ("Size", "Capacity", "HeadWaitTimeMills")
    }


def _span_text(milliseconds: int) -> str:
    minutes, seconds = divmod(milliseconds // 1_000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1_024:
            return f"{count:.1f} {unit}"
        count /= 1_024
    return f"{count:.1f} TiB"
