"""A day of a fleet in minutes: which alert fires after how long, for each incident that an operator meets.

    python -m bench.fleet_day [--only NAME,...] [--scale 30]

A server, two applications of two workers each (`mqtemplate run`), and Prometheus of Debian with the rules of
docs/grafana/alerts.yml, all on loopback. The durations in the rules are divided by *scale*, and some thresholds are
lower, so that an alert that takes ten minutes comes after twenty seconds. Each line: the incident, its alerts with the
time until each fired, further alerts that it may fire, the time from the repair until all ended; and faults: alerts
that did not fire, that fire for another incident, or that do not end. All incidents take about twenty minutes;
the script ends by itself, and ends only processes that it has started.

The disk of the server is a ``tmpfs`` in a mount namespace of its own, which takes root; without it the incidents of the
disk are left out. The certificate takes ``openssl``. The clock that differs is the clock of Python in one process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.fleet import SCRAPE_S, Alert, Fleet, started, until
from bench.measure import run

_QUIET_S = 45
_SKEW_S = 30


@dataclass(frozen=True)
class Incident:
    """What happens to the fleet.

    Attributes:
        alerts: Those that must fire.
        start: Begins it.
        repair: Ends it.
        also: Those that may fire.
        watched_s: Time for which it is watched after its alerts have fired.
    """

    name: str
    alerts: Sequence[Alert]
    start: Callable[[], object]
    repair: Callable[[], object]
    also: Sequence[Alert] = ()
    watched_s: float = 0


def incidents(fleet: Fleet) -> Iterator[Incident]:
    """Yield the incidents that this machine can show."""
    yield Incident("nothing", [], _nothing, _nothing, watched_s=_QUIET_S)
    yield from _of_processes(fleet)
    yield from _of_groups(fleet)
    yield from _of_messages(fleet)
    yield from _of_clocks(fleet)
    if shutil.which("openssl"):
        yield Incident(
            "certificate expires in a day",
            [Alert("MqtemplateCertificateExpires", "broker")],
            lambda: fleet.new_certificate(1),
            lambda: fleet.new_certificate(90),
        )
    yield Incident(
        "too many connections",
        [Alert("MqtemplateConnectionsRefused", "broker")],
        fleet.hold_connections,
        fleet.close_connections,
    )
    yield from _of_the_copy(fleet)
    if fleet.has_disk:
        yield from _of_the_disk(fleet)


def _nothing() -> None:
    """Change nothing."""


def _of_processes(fleet: Fleet) -> Iterator[Incident]:
    gone, mail = "MqtemplateProcessGone", fleet.applications["mail"]
    down = [Alert("MqtemplateWorkerDown", "shop")]
    starting = [Alert("MqtemplateWorkerDown", "mail")]  # a start takes longer than the divided two minutes
    yield Incident(
        "application is killed",
        [Alert(gone, "mail")],
        lambda: mail.end(signal.SIGKILL),
        fleet.restart_mail,
        starting,
    )
    yield Incident(
        "application is stopped for good", [Alert("MqtemplateJobGone", "mail")], mail.end, fleet.restart_mail, starting
    )
    yield Incident(
        "broker is killed", [Alert(gone, "broker")], lambda: fleet.broker.end(signal.SIGKILL), fleet.broker.start
    )
    # Once a minute a scrape of an application waits for the broker: longer than the divided two minutes.
    yield Incident(
        "broker hangs",
        [Alert(gone, "broker")],
        lambda: fleet.signal_broker(signal.SIGSTOP),
        lambda: fleet.signal_broker(signal.SIGCONT),
        [*down, *starting],
        20,
    )
    yield Incident(
        "worker hangs", down, lambda: fleet.signal_worker(signal.SIGSTOP), lambda: fleet.signal_worker(signal.SIGCONT)
    )
    yield Incident("worker cannot start again", down, fleet.break_worker, fleet.mend_worker)


def _of_groups(fleet: Fleet) -> Iterator[Incident]:
    slow, fails, hangs = (fleet.folder / "shop" / name for name in ("slow", "fails", "hangs"))
    behind, stands = Alert("MqtemplateGroupBehind", "shop"), Alert("MqtemplateLagStands", "shop")

    def pause() -> None:
        fleet.listener("pause")
        fleet.send("shop-orders", count=3)

    def grow() -> None:
        slow.touch()
        fleet.start_sending("shop-orders", 60)

    def recover() -> None:
        fleet.stop_sending()
        slow.unlink()

    def fail() -> None:
        fails.touch()
        fleet.start_sending("shop-orders", 2)  # few: their retries come during the next incidents

    def hang() -> None:
        hangs.touch()
        fleet.send("shop-orders")

    def work_again() -> None:
        fleet.stop_sending()
        fails.unlink()

    yield Incident("handlers fail", [Alert("MqtemplateHandlersFail")], fail, work_again)
    yield Incident(
        "handler hangs",
        [Alert("MqtemplateHandlersHang", "shop")],
        hang,
        hangs.unlink,
        [behind, stands],  # its message is not consumed meanwhile
    )
    yield Incident("listener is paused, 3 messages", [behind, stands], pause, lambda: fleet.listener("resume"))
    yield Incident("more is sent than consumed", [Alert("MqtemplateLagGrows", "shop")], grow, recover, [behind], 30)
    yield Incident(
        "first dead letters",
        [Alert("MqtemplateDeadLetters", "shop")],
        lambda: fleet.send("shop-orders", b"bad", 3),
        fleet.purge_dead_letters,
        [Alert("MqtemplateHandlersFail")],
    )


def _of_messages(fleet: Fleet) -> Iterator[Incident]:
    slow, topic = fleet.folder / "shop" / "slow", "shop-forwards"

    def refuse() -> None:
        fleet.set_writable(topic, is_writable=False)
        fleet.start_sending("shop-orders", 5, "forward")

    def accept() -> None:
        fleet.stop_sending()
        fleet.set_writable(topic, is_writable=True)

    def be_late() -> None:
        slow.touch()
        fleet.listener("concurrency", number=1)
        fleet.start_sending("shop-orders", 5, delay_ms=1_000)

    def be_on_time() -> None:
        fleet.stop_sending()
        fleet.listener("concurrency", number=20)
        slow.unlink()

    yield Incident("sends of a handler are refused", [Alert("MqtemplateSendsFail", "shop")], refuse, accept)
    yield Incident(
        "more delayed messages than consumed",
        [Alert("MqtemplateDeliveriesLate", "shop")],
        be_late,
        be_on_time,
        [Alert(f"Mqtemplate{name}", "shop") for name in ("GroupBehind", "LagGrows")],
    )
    yield Incident(
        "record of a delayed message is damaged",
        [Alert("MqtemplateReleasesPoison", "broker")],
        lambda: fleet.damage_delayed_message("mail-orders", 5_000),
        fleet.mend_delayed_message,
    )


def _of_clocks(fleet: Fleet) -> Iterator[Incident]:
    of_messages = "MqtemplateClockSkewOfMessages"

    def behind() -> None:
        fleet.restart_mail(_SKEW_S)
        fleet.send("mail-orders")

    yield Incident(
        f"clock of a producer {_SKEW_S} s ahead",
        [Alert(of_messages, "shop")],
        lambda: fleet.send("shop-orders", ahead_ms=_SKEW_S * 1_000),
        _nothing,
    )
    yield Incident(
        f"clock of an application {_SKEW_S} s behind",
        [Alert("MqtemplateClockSkew", "mail"), Alert(of_messages, "mail")],
        behind,
        fleet.restart_mail,
        [Alert(f"Mqtemplate{name}", "mail") for name in ("JobGone", "ProcessGone", "WorkerDown")],  # it is restarted
    )


def _of_the_copy(fleet: Fleet) -> Iterator[Incident]:
    behind, fails, refused, old, silent, grows, fenced, gone = (
        Alert(f"Mqtemplate{name}", "broker")
        for name in (
            *("CopyBehind", "CopyFails", "CopyRefused", "CopySnapshotOld", "CopyFollowerSilent", "CopyLagGrows"),
            *("CopyFenced", "ProcessGone"),
        )
    )

    def lose_lease() -> None:
        fleet.restart_broker(lease="20s")
        fleet.break_copy()

    def have_no_lease() -> None:
        fleet.mend_copy()
        fleet.restart_broker(lease=None)

    def store() -> None:
        fleet.break_copy()
        fleet.start_sending("mail-orders", 4, os.urandom(500).hex())

    def copy_again() -> None:
        fleet.stop_sending()
        fleet.mend_copy()

    yield Incident("follower of the copy is killed", [silent], fleet.kill_follower, fleet.stop_follower)
    yield Incident("copy cannot be written", [fails, behind, old], fleet.break_copy, fleet.mend_copy)
    yield Incident("more is stored than copied", [grows, fails, behind], store, copy_again, [old])
    yield Incident("lease of the copy is over", [fenced, fails], lose_lease, have_no_lease, [behind, old, gone])
    # The server reads the epochs with its signs of life, each twenty seconds. It is restarted for the repair.
    yield Incident("copy is taken over", [refused], fleet.take_over_copy, fleet.give_copy_back, [behind, old, gone], 5)


def _of_the_disk(fleet: Fleet) -> Iterator[Incident]:
    near, full, fills, in_a_day, deleted, refused = (
        Alert(f"Mqtemplate{name}", "broker")
        for name in (
            "DiskNearLimit",
            "DiskFull",
            "DiskFills",
            "DiskFullInADay",
            "MessagesDeleted",
            "MessagesRefused",
        )
    )
    unread = Alert("MqtemplateUnreadMessagesDeleted")
    yield Incident(
        "disk fills, 2 MiB a second",
        [fills, near, full],
        lambda: fleet.fill_disk(0.92, 0.5),
        fleet.empty_disk,
        [in_a_day],
    )

    def fill() -> None:
        # Some files of the log, which can be deleted. A body that is not random would be compressed to nothing.
        fleet.send("mail-orders", os.urandom(50_000).hex().encode(), 80)
        fleet.fill_disk(0.97, 0.01)

    yield Incident(
        "disk refuses",
        [near, refused, deleted, full],
        fill,
        fleet.empty_disk,
        [fills, in_a_day, unread],
    )

    def outrun_copy() -> None:
        fleet.break_copy()
        fleet.delete_messages(fill)
        fleet.mend_copy()

    copies = [Alert(f"Mqtemplate{name}", "broker") for name in ("CopyBehind", "CopyFails", "CopySnapshotOld")]
    yield Incident(
        "disk is full, and the copy fails",
        [Alert("MqtemplateCopyGap", "broker")],
        outrun_copy,
        fleet.empty_disk,
        [near, refused, deleted, full, fills, in_a_day, *copies, unread],
    )


class Watch:
    """What Prometheus shows from the beginning of an incident on.

    Attributes:
        fired: Alert -> seconds from the beginning to its first firing.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._before = fleet.firing()
        self._start = time.monotonic()
        self.fired: dict[Alert, float] = {}

    def look(self) -> set[Alert]:
        """Return the alerts that fire now."""
        firing = self._fleet.firing()
        self._before &= firing
        for alert in firing - self._before:
            self.fired.setdefault(alert, time.monotonic() - self._start)
        return firing

    def has_seen(self, alerts: Sequence[Alert]) -> bool:
        """Look, and return True if all of these have fired."""
        self.look()
        return self.fired.keys() >= set(alerts)

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return time.monotonic() - self._start


def meet(fleet: Fleet, incident: Incident) -> int:
    """Let an incident happen, print which alerts fired after how long, and return the number of faults."""
    watch = Watch(fleet)
    incident.start()
    faults = []
    try:
        until(lambda: watch.has_seen(incident.alerts), incident.name)
    except TimeoutError:
        missing = sorted(set(incident.alerts) - watch.fired.keys())
        faults.append(f"NOT FIRED: {_names(missing)}")
    end_s = watch.seconds() + incident.watched_s
    while watch.seconds() < end_s:
        watch.look()
        time.sleep(0.5)
    incident.repair()
    try:
        ended = f"ended {until(lambda: not watch.look(), 'no alert fires'):.0f} s after the repair"
    except TimeoutError:
        ended = "not ended"
        faults.append(f"STILL FIRING: {_names(sorted(watch.look()))}")
    allowed = {*incident.also, *(Alert(each.name) for each in incident.also)}
    others = {each for each in watch.fired.keys() - set(incident.alerts) if not {each, Alert(each.name)} & allowed}
    if others:
        faults.append(f"FALSE: {_names(sorted(others), watch.fired)}")
    further = sorted(watch.fired.keys() - set(incident.alerts) - others)
    shown = [_names([each for each in incident.alerts if each in watch.fired], watch.fired) or "no alert"]
    shown += [f"also {_names(further, watch.fired)}"] if further else []
    print(f"{incident.name:36} {'; '.join([*shown, ended, *faults])}", flush=True)
    return len(faults)


def _names(alerts: Sequence[Alert], fired: Mapping[Alert, float] | None = None) -> str:
    times = {} if fired is None else {alert: f" {fired[alert]:.0f} s" for alert in alerts}
    return ", ".join(f"{each.name.removeprefix('Mqtemplate')}({each.of}){times.get(each, '')}" for each in alerts)


def main() -> None:
    """Meet the incidents one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words of the names of incidents, with commas between")
    parser.add_argument("--scale", type=float, default=30, help="divides the durations in the rules")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is missing; on Debian: apt-get install prometheus")
    words = [word for word in options.only.split(",") if word]
    start, faults = time.monotonic(), 0
    with started(options.scale) as fleet:
        print(f"durations of the rules divided by {options.scale:g}; scrapes every {SCRAPE_S} s", flush=True)
        for incident in incidents(fleet):
            if not words or any(word in incident.name for word in words):
                faults += meet(fleet, incident)
    print(f"{faults} faults; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    run(main)
