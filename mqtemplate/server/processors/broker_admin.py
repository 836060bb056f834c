"""Requests of administrators about the broker: runtime information, statistics and settings.

Source: RocketMQ ``broker: AdminBrokerProcessor``. The names of the values are those that ``mqadmin`` reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from mqtemplate.engine.engine import Engine
from mqtemplate.errors import ConfigurationError, CorruptRecordError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.route import BrokerStatsData, KVTable
from mqtemplate.remoting.protocol.codes import CURRENT_VERSION, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import GetBrokerConfigResponseHeader, ViewBrokerStatsDataRequestHeader
from mqtemplate.server.processors.statistics import IN, OUT, DayTotals, Traffic
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs

_log = get_logger("mqtemplate.admin")

_DELAY_LEVELS = "messageDelayLevel"
"""The only setting that can be changed while the broker runs."""

_QUEUES = [f"{name}ThreadPoolQueue" for name in ("send", "pull", "query", "litePull", "ack")]
_CONSTANTS = {
    # RocketMQ's broker has thread pools, and services that may lag behind the log. This broker has neither.
    **{f"{queue}{value}": "0" for queue in _QUEUES for value in ("Size", "Capacity", "HeadWaitTimeMills")},
    **dict.fromkeys(("dispatchBehindBytes", "pageCacheLockTimeMills", "timerReadBehind", "timerOffsetBehind"), "0"),
    "timerCongestNum": "0",
    "timerEnqueueTps": "0.0",
    "timerDequeueTps": "0.0",
}
"""Values that tools read and that are constant here."""


@dataclass(frozen=True, slots=True)
class BrokerAdminProcessor:
    """Processors of requests about the broker.

    Attributes:
        address: Returns the address that clients connect to.
        boot_ms: When the server was created.
    """

    engine: Engine
    settings: BrokerServerSettings
    topics: TopicConfigs
    traffic: Traffic
    address: Callable[[], str]
    boot_ms: int

    # --- runtime information -------------------------------------------------------------------

    @answers(RequestCode.GET_BROKER_RUNTIME_INFO, slow=True)
    def _runtime_info(self) -> KVTable:
        """Return the values that tools show."""
        boot_ms, version, traffic = str(self.boot_ms), CURRENT_VERSION, self.traffic
        rates_out = _rates_text(traffic.rates(OUT))
        info = {
            "brokerActive": "true",
            "brokerVersion": str(int(version)),
            "brokerVersionDesc": version.name,
            "bootTimestamp": boot_ms,
            "startAcceptSendRequestTimeStamp": boot_ms,
            "runtime": _duration_text(self.engine.clock.now_ms() - self.boot_ms),
            "putTps": _rates_text(traffic.rates(IN)),
            "getTransferredTps": rates_out,
            "getTotalTps": rates_out,
            "getFoundTps": rates_out,
            "getMissTps": "0.0 0.0 0.0",
            **_day_totals("msgPutTotal", traffic.totals(IN)),
            **_day_totals("msgGetTotal", traffic.totals(OUT)),
            **self._store_info(),
            **_CONSTANTS,
        }
        return KVTable(table=dict(sorted(info.items())))

    def _store_info(self) -> dict[str, str]:
        store = self.engine.store
        return {
            "commitLogMinOffset": str(store.start_offset),
            "commitLogMaxOffset": str(store.end_offset),
            "remainHowManyDataToFlush": f"{max(store.end_offset - store.confirm_offset, 0)} B",
            "earliestMessageTimeStamp": str(self._earliest_ms()),
            **self._disk_info(),
        }

    def _disk_info(self) -> dict[str, str]:
        ratio = f"{self.engine.store.store_files.disk_used_ratio():.4f}"
        info = {"commitLogDiskRatio": ratio, "consumeQueueDiskRatio": ratio}
        if (path := self.engine.path) is not None:
            usage = shutil.disk_usage(path)
            info["commitLogDirCapacity"] = f"Total : {_bytes_text(usage.total)}, Free : {_bytes_text(usage.free)}."
        return info

    def _earliest_ms(self) -> int:
        """Return when the first message in the log was stored, or -1 for an empty log."""
        store = self.engine.store
        try:
            record = store.read_at(store.start_offset) if store.start_offset < store.confirm_offset else None
        except CorruptRecordError:
            return -1
        return -1 if record is None else record.store_timestamp

    @answers(RequestCode.VIEW_BROKER_STATS_DATA)
    def _stats(self, query: ViewBrokerStatsDataRequestHeader) -> BrokerStatsData:
        found: BrokerStatsData | None = None
        name, key = query.stats_name, query.stats_key
        if name == "TOPIC_PUT_NUMS":
            if self.topics.find(key) is not None:
                found = self.traffic.topic_stats(key)
        elif name == "GROUP_GET_NUMS":
            topic, _, group = key.rpartition("@")
            found = self.traffic.group_stats(group, topic)
        if found is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"no statistics {name!r} of {key!r}")
        return found

    # --- settings ------------------------------------------------------------------------------

    @answers(RequestCode.GET_BROKER_CONFIG)
    def _config(self) -> tuple[GetBrokerConfigResponseHeader, bytes]:
        text = "".join(f"{name}={value}\n" for name, value in sorted(self.config().items()))
        version = json.dumps({"counter": 0, "stateVersion": 0, "timestamp": self.boot_ms})
        return GetBrokerConfigResponseHeader(version=version), text.encode()

    def config(self) -> dict[str, str]:
        """Return the settings by RocketMQ's names. None of them is secret."""
        broker, server = self.engine, self.settings
        engine, store = broker.settings, broker.store
        ip, _, port = self.address().rpartition(":")
        values: dict[str, object] = {
            "brokerClusterName": server.cluster_name,
            "brokerName": broker.name,
            "brokerId": 0,
            "brokerIP1": ip,
            "listenPort": port,
            "brokerPermission": 6,
            "brokerRole": "ASYNC_MASTER",
            "autoCreateTopicEnable": self.topics.auto_create,
            "autoCreateSubscriptionGroup": server.auto_create_subscription_group,
            "defaultTopicQueueNums": server.default_topic_queue_nums,
            "enablePropertyFilter": server.enable_property_filter,
            "recallMessageEnable": server.recall_message_enable,
            "regionId": server.region_id,
            "storePathRootDir": broker.path or "memory",
            "flushDiskType": engine.flush_disk_type.value,
            "flushConsumerOffsetInterval": engine.flush_consumer_offset_interval_ms,
            "mappedFileSizeCommitLog": store.sizes.commit_log,
            "mappedFileSizeConsumeQueue": store.sizes.consume_queue,
            "mappedFileSizeTimerLog": broker.delayed.timer_log_file_size,
            "maxHashSlotNum": store.index.geometry.slots,
            "maxIndexNum": store.index.geometry.units,
            "maxMessageSize": engine.max_message_size,
            _DELAY_LEVELS: broker.levels.text,
            "timerWheelEnable": engine.timer_wheel_enable,
            "timerPrecisionMs": engine.timer_precision_ms,
            "timerMaxDelaySec": engine.timer_max_delay_sec,
            "timerRollWindowSlot": engine.timer_roll_window_slot,
            "fileReservedTime": engine.file_reserved_time,
            "deleteWhen": engine.delete_when,
            "diskMaxUsedSpaceRatio": engine.disk_max_used_space_ratio,
        }
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}

    @answers(RequestCode.UPDATE_BROKER_CONFIG, slow=True)
    def _update_config(self, connection: Connection, request: RemotingCommand) -> None:
        """Change settings: all of the requested ones or none."""
        requested = _parse_properties(request.body.decode("utf-8", "replace"))
        config = self.config()
        fixed = [name for name, value in requested.items() if name != _DELAY_LEVELS and config.get(name) != value]
        if fixed:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"{', '.join(fixed)} cannot be changed while the broker runs, only {_DELAY_LEVELS} can; change "
                "application.yml and restart the broker",
            )
        if _DELAY_LEVELS in requested:
            try:
                self.engine.change_delay_levels(requested[_DELAY_LEVELS])
            except ConfigurationError as exc:
                raise RefusedError(ResponseCode.INVALID_PARAMETER, str(exc)) from exc
        _log.info("admin.config_updated", names=sorted(requested), by=str(connection.remote))


def _parse_properties(text: str) -> dict[str, str]:
    """Parse lines ``name=value`` of a Java properties file."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith(("#", "!"))]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _rates_text(rates: tuple[float, float, float]) -> str:
    return " ".join(str(round(rate, 4)) for rate in rates)


def _day_totals(name: str, totals: DayTotals) -> dict[str, str]:
    moments = ("YesterdayMorning", "TodayMorning", "TodayNow")
    return {f"{name}{moment}": str(total) for moment, total in zip(moments, totals, strict=True)}


def _duration_text(milliseconds: int) -> str:
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
