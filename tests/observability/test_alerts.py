"""The alert rules: which incident fires which alert, when it ends, and what must not fire one.

``promtool`` evaluates the rules with series as the programs export them, with one value in a minute.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mqtemplate.observability import INSTRUMENTS
from mqtemplate.observability.catalogue import exported_name
from tests.programs import run

DOCS = Path(__file__).parents[2] / "docs"
RULES: list[dict[str, Any]] = yaml.safe_load((DOCS / "grafana" / "alerts.yml").read_text(encoding="utf-8"))["groups"][
    0
]["rules"]
SEVERITIES = {rule["alert"]: rule["labels"]["severity"] for rule in RULES}

DAY_S = 86_400
USED = re.compile(r"\b((?:mqtemplate|messaging)_\w+)\b(?:\{([^}]*)\})?")
TARGET_LABELS = {"job", "instance", "mqtemplate_worker"}
"""Labels of Prometheus, and of an application of several processes."""

BROKER = 'job="broker",instance="b"'
WORKER = 'job="shop",instance="a",mqtemplate_worker="1"'
GROUP = 'messaging_consumer_group_name="billing"'
QUEUE = f'{GROUP},messaging_destination_name="orders",messaging_destination_partition_id'
LISTENER = f'{WORKER},{GROUP},mqtemplate_listener="bill"'
HANDLED = (
    f'messaging_client_consumed_messages_total{{{LISTENER},messaging_destination_name="orders",'
    'messaging_operation_name="process",messaging_system="rocketmq"}'
)
SENT = (
    f'messaging_client_sent_messages_total{{{WORKER},messaging_destination_name="orders",'
    'messaging_operation_name="send",messaging_system="rocketmq"}'
)
UP = f"up{{{BROKER}}}"
CLOCK = f"mqtemplate_clock_now_seconds{{{BROKER}}}"
BEHIND = f'mqtemplate_group_behind_seconds{{{BROKER},{GROUP},messaging_destination_name="orders"}}'
LAG_0 = f'mqtemplate_group_lag{{{BROKER},{QUEUE}="0"}}'
LAG_1 = f'mqtemplate_group_lag{{{BROKER},{QUEUE}="1"}}'
COMMITTED_0 = f'mqtemplate_group_committed{{{BROKER},{QUEUE}="0"}}'
COMMITTED_1 = f'mqtemplate_group_committed{{{BROKER},{QUEUE}="1"}}'
OPEN = f'mqtemplate_group_dead_letters{{{BROKER},{GROUP},mqtemplate_state="open"}}'
LATE = f"mqtemplate_lateness_delivery_seconds_bucket{{{LISTENER},le="
UNREAD = f'mqtemplate_store_unread_deleted_total{{{BROKER},{GROUP},messaging_destination_name="orders"}}'
SEND_ERRORS = (
    f'mqtemplate_client_send_errors_total{{{WORKER},messaging_destination_name="orders",error_type="SendTimeoutError"}}'
)
FREE = f"mqtemplate_store_disk_free{{{BROKER}}}"
LIMIT = f"mqtemplate_store_disk_limit_free{{{BROKER}}}"

AT_BROKER = {"instance": "b"}
AT_APPLICATION = {"instance": "a"}
OF_GROUP = {"messaging_consumer_group_name": "billing"}
OF_TOPIC = {**OF_GROUP, "messaging_destination_name": "orders"}
OF_LISTENER = {"mqtemplate_listener": "bill"}
OF_CONSOLE = 'job="rocketmq",instance="c",mqtemplate_broker="broker-a"'
AT_CONSOLE = {"instance": "c", "mqtemplate_broker": "broker-a"}
TOPIC_LATE = f'mqtemplate_delay_lag_seconds_bucket{{{OF_CONSOLE},messaging_destination_name="orders",le='
QUIET = None
MIB = 1 << 20


def failed(next_step: str) -> str:
    return f'mqtemplate_listener_failed_total{{{LISTENER},mqtemplate_next_step="{next_step}"}}'


def gauge(name: str) -> str:
    return f"mqtemplate_{name}{{{BROKER}}}"


COPY_LAG = gauge("copy_lag_seconds")
COPY_MAX_LAG = gauge("copy_max_lag_seconds")


def flat(value: float, minutes: int) -> str:
    """Return the same value for so many minutes."""
    return f"{value}+0x{minutes - 1}"


@dataclass(frozen=True)
class Incident:
    """What happens, and what one alert does.

    Attributes:
        series: Series -> values, one each minute from minute 0; ``_`` is none, ``stale`` the end of the series.
        states: Minute -> labels of the alert that fires, or QUIET.
    """

    title: str
    alert: str
    series: dict[str, str]
    states: dict[int, dict[str, str] | None]


BROKER_LABELS = {"job": "broker", "instance": "b"}

INCIDENTS = [
    # --- processes
    Incident("a broker ends and comes back", "MqtemplateProcessGone",
             {UP: f"{flat(1, 10)} {flat(0, 10)} {flat(1, 10)}", CLOCK: f"0+60x9 stale {'_ ' * 9} 1200+60x9"},
             {9: QUIET, 11: QUIET, 12: BROKER_LABELS, 19: BROKER_LABELS, 20: QUIET}),
    Incident("a broker is restarted within a minute", "MqtemplateProcessGone",
             {UP: f"{flat(1, 10)} 0 {flat(1, 10)}", CLOCK: "0+60x9 stale 660+60x9"}, {10: QUIET, 12: QUIET}),
    Incident("a process of another program is gone", "MqtemplateProcessGone", {UP: flat(0, 20)}, {19: QUIET}),
    Incident("all processes of a job end in order and leave the service discovery", "MqtemplateJobGone",
             {UP: f"{flat(1, 10)} stale {'_ ' * 80}", CLOCK: "0+60x9 stale"},
             {9: QUIET, 14: QUIET, 15: {"job": "broker"}, 60: {"job": "broker"}, 75: QUIET}),
    Incident("a deployment takes three minutes", "MqtemplateJobGone",
             {UP: f"{flat(1, 10)} stale _ _ {flat(1, 10)}", CLOCK: "0+60x9 stale _ _ 780+60x9"},
             {12: QUIET, 16: QUIET}),
    Incident("a worker is killed again and again", "MqtemplateWorkerDown",
             {f"mqtemplate_worker_up_ratio{{{WORKER}}}": f"{flat(1, 10)} {flat(0, 5)} {flat(1, 10)}"},
             {11: QUIET, 12: {"instance": "a", "mqtemplate_worker": "1"}, 15: QUIET}),
    Incident("a worker hangs, and the process that serves the address says so", "MqtemplateProcessGone",
             {UP: flat(1, 25), f"mqtemplate_worker_up_ratio{{{WORKER}}}": f"{flat(1, 10)} {flat(0, 15)}",
              CLOCK: "0+60x24"}, {12: QUIET, 24: QUIET}),
    # --- backlogs
    Incident("a listener is paused in an idle night", "MqtemplateGroupBehind",
             {BEHIND: f"{flat(0, 10)} 0+60x20 0+0x10"}, {9: QUIET, 20: QUIET, 21: OF_TOPIC, 30: OF_TOPIC, 31: QUIET}),
    Incident("an application is restarted", "MqtemplateGroupBehind", {BEHIND: "0 0 60 120 180 240 0 0 0 0 0 0"},
             {5: QUIET, 11: QUIET}),
    Incident("an idle night", "MqtemplateGroupBehind", {BEHIND: flat(0, 600)}, {599: QUIET}),
    Incident("more is sent than consumed, until there are more workers", "MqtemplateLagGrows",
             {LAG_0: f"{flat(0, 10)} 0+100x40 4000-200x20", LAG_1: f"{flat(0, 10)} 0+50x40 2000-100x20"},
             {9: QUIET, 30: QUIET, 32: OF_GROUP, 45: OF_GROUP, 70: QUIET}),
    Incident("a batch of 50,000 is consumed in ten minutes", "MqtemplateLagGrows",
             {LAG_0: f"{flat(0, 10)} 50000-5000x10 {flat(0, 30)}"}, {11: QUIET, 20: QUIET, 30: QUIET}),
    Incident("a listener is paused with three messages", "MqtemplateLagStands",
             {LAG_0: f"{flat(0, 10)} {flat(3, 30)} {flat(0, 10)}", LAG_1: flat(0, 50),
              COMMITTED_0: f"{flat(7, 40)} {flat(10, 10)}", COMMITTED_1: flat(7, 50)},
             {19: QUIET, 24: QUIET, 25: OF_TOPIC, 39: OF_TOPIC, 40: QUIET}),
    Incident("a group that the broker did not know does not consume", "MqtemplateLagStands",
             {LAG_0: f"{'_ ' * 10} {flat(3, 10)}"}, {14: QUIET, 15: OF_TOPIC}),
    Incident("the broker is restarted after 20 minutes, and the backlog is consumed", "MqtemplateLagStands",
             {LAG_0: f"{flat(0, 10)} stale {'_ ' * 20} 500 400 200 50 {flat(0, 10)}",
              COMMITTED_0: f"{flat(7, 10)} stale {'_ ' * 20} 7 107 307 457 {flat(507, 10)}"},
             {31: QUIET, 34: QUIET, 37: QUIET}),
    Incident("a listener consumes, but less than is sent", "MqtemplateLagStands",
             {LAG_0: f"{flat(0, 10)} 0+100x40", COMMITTED_0: f"{flat(7, 10)} 7+50x40"}, {25: QUIET, 50: QUIET}),
    Incident("one process of a RocketMQ cluster's application consumes, the other one hangs", "MqtemplateLagStands",
             {LAG_0: f"{flat(0, 10)} 1+100x30", LAG_1: f"{flat(0, 10)} 1+100x30",
              COMMITTED_0.replace("}", ',mqtemplate_worker="1"}'): f"{flat(7, 10)} 7+50x30",
              COMMITTED_1.replace("}", ',mqtemplate_worker="2"}'): flat(7, 41)}, {24: QUIET, 25: OF_TOPIC}),
    Incident("a busy listener always has some messages", "MqtemplateLagStands",
             {LAG_0: f"{'5 9 3 7 ' * 10}", COMMITTED_0: "0+20x40"}, {39: QUIET}),
    Incident("an idle night", "MqtemplateLagStands", {LAG_0: flat(0, 600)}, {599: QUIET}),
    # --- failures
    Incident("the first dead letter of a known group", "MqtemplateDeadLetters",
             {OPEN: f"{flat(0, 10)} {flat(1, 30)}"}, {9: QUIET, 10: OF_GROUP, 19: OF_GROUP, 21: QUIET}),
    Incident("a group begins with its first dead letters", "MqtemplateDeadLetters",
             {OPEN: f"{'_ ' * 10} {flat(2, 30)}"}, {9: QUIET, 10: OF_GROUP, 19: OF_GROUP, 25: QUIET}),
    Incident("a dead letter is sent again, and fails again", "MqtemplateDeadLetters",
             {OPEN: f"{flat(4, 20)} {flat(3, 20)} {flat(4, 20)}"}, {25: QUIET, 39: QUIET, 40: OF_GROUP, 51: QUIET}),
    Incident("the broker with old dead letters is down for an hour", "MqtemplateDeadLetters",
             {OPEN: f"{flat(4, 20)} stale {'_ ' * 60} {flat(4, 20)}"}, {81: QUIET, 90: QUIET}),
    Incident("an application on a RocketMQ cluster has its first dead letter", "MqtemplateDeadLetters",
             {failed("dead_letter"): f"{flat(0, 10)} {flat(1, 30)}"}, {9: QUIET, 11: OF_GROUP, 25: QUIET}),
    Incident("that application is restarted", "MqtemplateDeadLetters",
             {failed("dead_letter"): f"{flat(5, 20)} stale {flat(0, 20)}"}, {19: QUIET, 21: QUIET, 30: QUIET}),
    Incident("a handler begins to fail, with its first messages", "MqtemplateHandlersFail",
             {failed("redelivery"): f"{flat(0, 5)} 1+1x20 {flat(21, 20)}", failed("hanging"): flat(0, 46),
              HANDLED: f"{'_ ' * 5} 1+1x40"}, {5: QUIET, 18: OF_LISTENER, 40: QUIET}),
    Incident("one message of hundred fails", "MqtemplateHandlersFail",
             {failed("redelivery"): "0+1x40", HANDLED: "0+100x40"}, {39: QUIET}),
    Incident("a handler hangs", "MqtemplateHandlersHang",
             {f"mqtemplate_listener_hanging{{{LISTENER}}}": f"{flat(0, 10)} {flat(1, 10)} {flat(0, 5)}"},
             {14: QUIET, 15: {"instance": "a", **OF_LISTENER}, 20: QUIET}),
    Incident("all sends fail from the first one on", "MqtemplateSendsFail",
             {SEND_ERRORS: f"{'_ ' * 5} 1+1x20 {flat(21, 20)}", SENT: f"{'_ ' * 5} 1+1x40"},
             {5: QUIET, 15: AT_APPLICATION, 40: QUIET}),
    Incident("one send of a thousand fails", "MqtemplateSendsFail", {SEND_ERRORS: "0+1x40", SENT: "0+1000x40"},
             {39: QUIET}),
    # --- delays
    Incident("deliveries are two minutes late", "MqtemplateDeliveriesLate",
             {f'{LATE}"16.383"}}': f"0+10x9 {flat(90, 20)} 90+10x20", f'{LATE}"262.143"}}': "0+10x50",
              f'{LATE}"+Inf"}}': "0+10x50"}, {9: QUIET, 18: OF_GROUP, 45: QUIET}),
    Incident("the delay service falls behind", "MqtemplateDelayServiceBehind",
             {f'mqtemplate_delay_dequeue_lag_seconds{{{BROKER},mqtemplate_service="delay.timer"}}':
              f"{flat(0, 10)} {flat(40, 5)} {flat(0, 5)}"},
             {11: QUIET, 12: {**AT_BROKER, "mqtemplate_service": "delay.timer"}, 15: QUIET}),
    Incident("a level of a RocketMQ broker falls behind, not its timers", "MqtemplateDelayServiceBehind",
             {f'mqtemplate_delay_dequeue_lag_seconds{{{OF_CONSOLE},mqtemplate_service="delay.schedule"}}':
              f"{flat(0, 10)} {flat(40, 5)} {flat(0, 5)}",
              f'mqtemplate_delay_dequeue_lag_seconds{{{OF_CONSOLE},mqtemplate_service="delay.timer"}}': flat(1, 20)},
             {11: QUIET, 12: {**AT_CONSOLE, "mqtemplate_service": "delay.schedule"}, 15: QUIET}),
    Incident("a RocketMQ broker is down for ten minutes", "MqtemplateDelaysUnreadable",
             {f"mqtemplate_delay_readable_ratio{{{OF_CONSOLE}}}": f"{flat(1, 10)} {flat(0, 10)} {flat(1, 5)}"},
             {14: QUIET, 15: AT_CONSOLE, 20: QUIET}),
    Incident("a RocketMQ broker is restarted", "MqtemplateDelaysUnreadable",
             {f"mqtemplate_delay_readable_ratio{{{OF_CONSOLE}}}": f"{flat(1, 10)} {flat(0, 3)} {flat(1, 10)}"},
             {12: QUIET, 16: QUIET}),
    Incident("deliveries of a RocketMQ topic are two minutes late", "MqtemplateTopicDeliveriesLate",
             {f'{TOPIC_LATE}"16.383"}}': f"0+10x9 {flat(90, 20)} 90+10x20", f'{TOPIC_LATE}"262.143"}}': "0+10x50",
              f'{TOPIC_LATE}"+Inf"}}': "0+10x50"},
             {9: QUIET, 18: {"messaging_destination_name": "orders"}, 45: QUIET}),
    Incident("our own broker is late, which has no topics there", "MqtemplateTopicDeliveriesLate",
             {f'mqtemplate_delay_lag_seconds_bucket{{{BROKER},le="16.383"}}': flat(0, 30),
              f'mqtemplate_delay_lag_seconds_bucket{{{BROKER},le="+Inf"}}': "0+10x30"}, {25: QUIET}),
    Incident("a delayed message cannot be released", "MqtemplateReleasesPoison",
             {gauge("delay_poison_total"): f"{flat(0, 10)} {flat(1, 30)}"},
             {9: QUIET, 11: {**BROKER_LABELS}, 30: QUIET}),
    # --- disk
    Incident("the disk cannot be written to", "MqtemplateFlushFails",
             {gauge("store_flush_failed_ratio"): "0 0 1 1 0"}, {1: QUIET, 2: AT_BROKER, 4: QUIET}),
    Incident("the disk is nearly full", "MqtemplateDiskFull",
             {gauge("store_disk_used_ratio"): f"{flat(0.8, 10)} {flat(0.91, 10)} {flat(0.7, 5)}"},
             {14: QUIET, 15: AT_BROKER, 20: QUIET}),
    Incident("the disk fills in three hours, then it does not fill", "MqtemplateDiskFills",
             {gauge("store_disk_full_in_seconds"): f"{'_ ' * 5} 10800-60x20 stale"},
             {14: QUIET, 15: AT_BROKER, 27: QUIET}),
    Incident("a burst of five minutes", "MqtemplateDiskFills",
             {gauge("store_disk_full_in_seconds"): f"{'_ ' * 5} 3600-60x5 stale"}, {9: QUIET, 16: QUIET}),
    Incident("the disk fills in 20 hours, then there is a larger one", "MqtemplateDiskFullInADay",
             {FREE: "1200-1x300 9000-1x60", LIMIT: flat(0, 361)},
             {170: QUIET, 209: QUIET, 211: BROKER_LABELS, 355: QUIET}),
    Incident("another program fills half of the disk in two hours, and empties it", "MqtemplateDiskFullInADay",
             {FREE: f"{flat(9_000, 240)} 9000-50x120 {flat(9_000, 120)}", LIMIT: flat(0, 481)},
             {359: BROKER_LABELS, 390: QUIET, 425: QUIET, 480: QUIET}),
    Incident("a broker with much space was just started", "MqtemplateDiskFullInADay",
             {FREE: "1200-10x60", LIMIT: flat(0, 61)}, {60: QUIET}),
    Incident("the disk is full", "MqtemplateMessagesRefused",
             {gauge("store_refusing_ratio"): "0 0 1 1 0"}, {1: QUIET, 2: AT_BROKER, 4: QUIET}),
    Incident("files are deleted before their time", "MqtemplateMessagesDeleted",
             {gauge("store_forcibly_deleted_total"): f"{flat(0, 10)} {flat(900, 30)}"},
             {9: QUIET, 11: AT_BROKER, 25: QUIET}),
    Incident("the disk is near the limit", "MqtemplateDiskNearLimit",
             {gauge("store_disk_near_limit_ratio"): "0 0 1 1 0"}, {1: QUIET, 2: AT_BROKER, 4: QUIET}),
    Incident("the first unread messages of a group are deleted", "MqtemplateUnreadMessagesDeleted",
             {UNREAD: f"{'_ ' * 10} {flat(700, 30)}"}, {9: QUIET, 10: {**AT_BROKER, **OF_TOPIC}, 25: QUIET}),
    Incident("further ones are deleted", "MqtemplateUnreadMessagesDeleted",
             {UNREAD: f"{flat(700, 30)} {flat(900, 30)}"}, {29: QUIET, 31: {**AT_BROKER, **OF_TOPIC}, 45: QUIET}),
    Incident("Prometheus was stopped for half an hour", "MqtemplateUnreadMessagesDeleted",
             {UNREAD: f"{flat(700, 30)} {'_ ' * 30} {flat(700, 30)}"}, {61: QUIET, 75: QUIET}),
    Incident("a group keeps old files for a day", "MqtemplateRetentionHeld",
             {f"mqtemplate_store_retention_held{{{BROKER},{GROUP}}}": f"{flat(5000, 1500)} {flat(0, 10)}"},
             {1400: QUIET, 1441: {**AT_BROKER, **OF_GROUP}, 1505: QUIET}),
    # --- copy of the store directory
    Incident("the place of the copy does not answer for half an hour", "MqtemplateCopyBehind",
             {COPY_LAG: f"{flat(0.5, 10)} 60+60x29 {flat(0.4, 10)}", COPY_MAX_LAG: flat(600, 50)},
             {9: QUIET, 20: QUIET, 21: AT_BROKER, 39: AT_BROKER, 41: QUIET}),
    Incident("a place that is slow for some minutes", "MqtemplateCopyBehind",
             {COPY_LAG: f"{flat(1, 10)} 60+60x7 {flat(1, 10)}", COPY_MAX_LAG: flat(600, 28)}, {18: QUIET, 27: QUIET}),
    Incident("more is stored than the place takes, until less is stored", "MqtemplateCopyLagGrows",
             {gauge("copy_lag_bytes"): f"{flat(0, 10)} 0+{20 * MIB}x60 {1200 * MIB}-{60 * MIB}x20"},
             {14: QUIET, 28: QUIET, 30: AT_BROKER, 70: AT_BROKER, 91: QUIET}),
    Incident("a burst of a gigabyte is copied in five minutes", "MqtemplateCopyLagGrows",
             {gauge("copy_lag_bytes"): f"{flat(0, 10)} {1000 * MIB}-{200 * MIB}x5 {flat(0, 30)}"},
             {11: QUIET, 20: QUIET, 45: QUIET}),
    Incident("the place of the copy cannot be written", "MqtemplateCopyFails",
             {gauge("copy_failing_ratio"): f"{flat(0, 10)} {flat(1, 10)} {flat(0, 5)}"},
             {11: QUIET, 12: AT_BROKER, 19: AT_BROKER, 20: QUIET}),
    Incident("one attempt to copy fails", "MqtemplateCopyFails",
             {gauge("copy_failing_ratio"): f"{flat(0, 10)} 1 {flat(0, 5)}"}, {10: QUIET, 12: QUIET}),
    Incident("another process takes over the copy, and this one is stopped", "MqtemplateCopyRefused",
             {gauge("copy_refused_ratio"): "0 0 1 1 stale"}, {1: QUIET, 2: AT_BROKER, 3: AT_BROKER, 4: QUIET}),
    Incident("the lease is over, then the place answers again", "MqtemplateCopyFenced",
             {gauge("copy_fenced_ratio"): "0 0 1 1 0"}, {1: QUIET, 2: AT_BROKER, 3: AT_BROKER, 4: QUIET}),
    Incident("the snapshot of a day is an hour late, then written", "MqtemplateCopySnapshotOld",
             {gauge("copy_snapshot_overdue_seconds"): f"{flat(0, 10)} 60+60x90 {flat(0, 5)}"},
             {69: QUIET, 74: QUIET, 75: AT_BROKER, 100: AT_BROKER, 101: QUIET}),
    Incident("a follower is killed, and started again", "MqtemplateCopyFollowerSilent",
             {gauge("copy_follower_silent_seconds"): f"{flat(20, 10)} 80+60x9 {flat(20, 5)}"},
             {14: QUIET, 15: AT_BROKER, 19: AT_BROKER, 20: QUIET}),
    Incident("a follower is stopped", "MqtemplateCopyFollowerSilent",
             {gauge("copy_follower_silent_seconds"): f"{flat(20, 10)} stale"}, {9: QUIET, 30: QUIET}),
    Incident("retention outruns the copy", "MqtemplateCopyGap",
             {gauge("copy_gaps_total"): f"{flat(0, 10)} {flat(1, 30)}"}, {9: QUIET, 11: AT_BROKER, 25: QUIET}),
    Incident("a broker is started with a gap", "MqtemplateCopyGap",
             {gauge("copy_gaps_total"): f"{'_ ' * 10} {flat(1, 30)}"}, {9: QUIET, 10: AT_BROKER, 25: QUIET}),
    Incident("a broker that had a gap is restarted", "MqtemplateCopyGap",
             {gauge("copy_gaps_total"): f"{flat(1, 30)} stale {flat(0, 20)}"}, {29: QUIET, 32: QUIET, 50: QUIET}),
    # --- server
    Incident("a client opens too many connections", "MqtemplateConnectionsRefused",
             {gauge("server_refused_connections_total"): f"{flat(0, 10)} {flat(3, 30)}"},
             {9: QUIET, 11: BROKER_LABELS, 25: QUIET}),
    Incident("a certificate is renewed late", "MqtemplateCertificateExpires",
             {gauge("server_certificate_expiry_seconds"): f"{14 * DAY_S + 60}-60x30 {90 * DAY_S}-60x10"},
             {5: QUIET, 11: QUIET, 12: AT_BROKER, 31: QUIET}),
    # --- clocks
    Incident("the clock of a broker is set ten seconds ahead, and back", "MqtemplateClockSkew",
             {CLOCK: "0+60x9 610+60x9 1200+60x9"}, {9: QUIET, 14: QUIET, 15: BROKER_LABELS, 20: QUIET}),
    Incident("the clock of an idle broker is ten minutes behind", "MqtemplateClockSkew",
             {CLOCK: "-600+60x9"}, {4: QUIET, 5: BROKER_LABELS}),
    Incident("scrapes take two seconds", "MqtemplateClockSkew", {CLOCK: "2+60x20"}, {20: QUIET}),
    Incident("one message shows a producer whose clock is ahead", "MqtemplateClockSkewOfMessages",
             {gauge("clock_ahead_seconds"): f"{flat(0, 10)} 30 {flat(0, 30)}",
              gauge("clock_behind_seconds"): flat(0, 41)},
             {10: QUIET, 11: AT_BROKER, 27: QUIET}),
    Incident("the clock of a consumer is behind", "MqtemplateClockSkewOfMessages",
             {gauge("clock_ahead_seconds"): flat(0, 20), gauge("clock_behind_seconds"): flat(5, 20)}, {5: AT_BROKER}),
    Incident("clocks differ by some milliseconds", "MqtemplateClockSkewOfMessages",
             {gauge("clock_ahead_seconds"): flat(0.02, 20),
              gauge("clock_behind_seconds"): flat(0.003, 20)}, {19: QUIET}),
]  # fmt: skip

ID = [f"{each.alert.removeprefix('Mqtemplate')}: {each.title}" for each in INCIDENTS]


# --- with promtool ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing; on Debian: apt-get install prometheus")
    return found


@pytest.mark.parametrize("incident", INCIDENTS, ids=ID)
def test_an_incident_fires_its_alert_and_nothing_else_does(promtool: str, incident: Incident, tmp_path: Path) -> None:
    # Without annotations, which would have to be repeated here.
    rule = {key: value for key, value in _rule(incident.alert).items() if key != "annotations"}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    severity = {"severity": SEVERITIES[incident.alert]}
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in incident.series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": incident.alert,
                "exp_alerts": [] if labels is None else [{"exp_labels": labels | severity}],
            }
            for minute, labels in incident.states.items()
        ],
    }
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [case]})
    )

    done = run([promtool, "test", "rules", "test.yml"], tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules_with_their_annotations(promtool: str, tmp_path: Path) -> None:
    done = run([promtool, "check", "rules", str(DOCS / "grafana" / "alerts.yml")], tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


# --- without it ---------------------------------------------------------------------------------


def _rule(alert: str) -> dict[str, Any]:
    [rule] = [each for each in RULES if each["alert"] == alert]
    return rule


def _exported_labels() -> dict[str, set[str]]:
    """Return series -> labels, from the catalogue and the documented labels of each metric."""
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([\w.]+)` \| `[\w.]+` \| \w+ \| ([^|]*)\|", page, re.MULTILINE))
    names = re.findall(r"^\| `(\w+)` \| `[\w.]+` \| [^|]*\|$", page, re.MULTILINE)
    found = {}
    for instrument in INSTRUMENTS:
        words = set(re.findall(r"\w+", documented[instrument.source])) & {*names, "broker", "level"}
        labels = {exported_name(word) for word in words} | set(instrument.attributes or {}) | {"le"}
        for name in instrument.prometheus_names:
            found[name] = {label.replace(".", "_") for label in labels if label != "le" or name.endswith("_bucket")}
    return found


def test_expressions_use_metrics_and_labels_that_exist() -> None:
    exported = _exported_labels()
    for rule in RULES:
        without_grouping = re.sub(r"\b(?:by|on|ignoring) \([^)]*\)", "", rule["expr"])
        used = USED.findall(without_grouping)
        assert used, rule["alert"]
        for name, labels in used:
            assert name in exported, f"{rule['alert']} uses {name}, which is not in the catalogue"
            matched = set(re.findall(r"(\w+)(?==|!=|=~|!~)", labels))
            assert matched <= exported[name], f"{rule['alert']}: {name} has no label {matched - exported[name]}"
        kept = {name for names in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for name in names.split(", ")}
        known = TARGET_LABELS.union(*(exported[name] for name, _ in used))
        assert kept <= known, f"{rule['alert']} groups by {kept - known}"


def test_series_of_the_incidents_are_those_that_the_programs_export() -> None:
    exported = _exported_labels() | {"up": set()}
    for incident in INCIDENTS:
        for series in incident.series:
            name, _, labels = series.partition("{")
            given = set(re.findall(r'(\w+)="', labels))
            # A lag has these on a cluster, and if its listener reads from another broker.
            is_lag = name in ("mqtemplate_group_lag", "mqtemplate_group_committed")
            optional = {"mqtemplate_broker", "mqtemplate_listener"} if is_lag else set()
            if name.startswith("mqtemplate_delay_"):  # on a cluster
                optional = {"mqtemplate_broker", "messaging_destination_name"}
            assert given - exported[name] - TARGET_LABELS == set(), f"not exported: {series}"
            assert exported[name] - given - optional == set(), f"missing: {series}"


def test_each_alert_has_an_incident_that_fires_it_and_one_that_ends() -> None:
    fired = {each.alert for each in INCIDENTS if any(each.states.values())}
    ended = {each.alert for each in INCIDENTS if any(each.states.values()) and each.states[max(each.states)] is QUIET}

    assert fired == ended == set(SEVERITIES)


def test_each_alert_is_documented_with_its_duration() -> None:
    page = (DOCS / "observability.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(Mqtemplate\w+)` \| [^|]+ \| (\w+) \|$", page, re.MULTILINE))

    assert documented == {rule["alert"]: rule.get("for", "0m") for rule in RULES}
