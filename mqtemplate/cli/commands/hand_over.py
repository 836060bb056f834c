"""``hand-over``: the move of an application from one broker to another one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.invocation import (
    FROM_CONFIGURATION,
    ActuatorOptions,
    CommandCall,
    Confirmation,
    access_of,
    command,
    command_group,
)
from mqtemplate.cli.output import Columns, ExitCode
from mqtemplate.converters.readable import time_text
from mqtemplate.errors import MQTemplateError, StoreLockedError, UnsupportedError

if TYPE_CHECKING:
    from mqtemplate.broker import Broker
    from mqtemplate.context.settings.app import AppSettings
    from mqtemplate.handover.plan import HandOverPlan
    from mqtemplate.handover.run import RunReport
    from mqtemplate.operations import BrokerAccess

_HAND_OVER = command_group("hand-over", "Move an application from a folder or a server to another broker.")

Rate = Annotated[float | None, typer.Option(min=1, help="most messages per second")]

_TOPICS: Columns = {
    "TOPIC": "name",
    "QUEUES": "queue_count",
    "THERE": "existing",
    "RIGHTS": "rights",
    "READY": "ready",
    "": lambda record: "to create" if record["is_missing"] else "",
}
_GROUPS: Columns = {
    "GROUP": "name",
    "TOPICS": lambda record: ", ".join(record["topics"]),
    "OLD LAG": "old_lag",
    "NEW LAG": lambda record: "to create" if record["new_lag"] is None else record["new_lag"],
    "MEMBERS": "members",
}
_LAGS: Columns = {"GROUP": "name", "OLD LAG": "old", "NEW LAG": lambda record: record["new"]}


# --- both brokers -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sides:
    """Options that name the old broker and the new one."""

    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FOLDER|HOST:PORT", help="the old broker (default: mqtemplate.hand-over.from)"),
    ] = None
    target: Annotated[
        str | None,
        typer.Option("--to", metavar="NAME-SERVER", help="the new broker (default: rocketmq.name-server)"),
    ] = None

    def settings(self, call: CommandCall) -> AppSettings:
        """Return the settings of the application with both brokers.

        Raises:
            typer.BadParameter: The old broker is not known.
            ConfigurationError: The new one is not known, or both are one.
        """
        keys = {} if self.source is None else {"mqtemplate__hand_over__from": name_of(self.source)}
        chosen = call if self.target is None else replace(call, name_server=name_of(self.target))
        settings = chosen.settings(**keys)
        if settings.mqtemplate.hand_over.from_ is None:
            raise typer.BadParameter(
                "the old broker is not known: give --from with a store directory or host:port, or set "
                "mqtemplate.hand-over.from in application.yml",
                param_hint="--from",
            )
        return settings

    @contextmanager
    def old(self, call: CommandCall) -> Iterator[BrokerAccess]:
        """Open the old broker; the new one need not be known."""
        from mqtemplate.context.settings.clients import settings_of_old_broker

        if self.source is not None:
            with replace(call, name_server=name_of(self.source)).access() as access:
                yield access
            return
        with access_of(settings_of_old_broker(self.settings(call))) as access:
            yield access

    @contextmanager
    def both(self, call: CommandCall) -> Iterator[tuple[BrokerAccess, BrokerAccess, AppSettings]]:
        """Open both brokers."""
        from mqtemplate.context.settings.clients import settings_of_old_broker

        settings = self.settings(call)
        with access_of(settings_of_old_broker(settings)) as old, access_of(settings, create=True) as new:
            yield old, new, settings


def name_of(text: str) -> str:
    """Return a broker as ``rocketmq.name-server`` has it: a path is a store directory."""
    is_path = text.startswith((".", "/", "~")) or Path(text).is_dir() or ":" not in text
    return f"embedded:{Path(text).expanduser()}" if is_path and not text.startswith("embedded") else text


def _plan(call: CommandCall, old: Broker, new: Broker, settings: AppSettings, rate: float | None) -> HandOverPlan:
    from mqtemplate.handover.plan import create_plan

    given = settings.mqtemplate.hand_over
    with call.output.progress("reading pending messages", None) as advance:
        return create_plan(
            old,
            new,
            source=str(given.from_),
            target=str(settings.rocketmq.name_server),
            rate=rate or given.rate,
            open_transactions=_open_transactions(old),
            on_progress=advance,
        )


def _open_transactions(old: Broker) -> int:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

    return old.engine.transactions.open_count if isinstance(old, EmbeddedBroker) else 0


def _print_plan(call: CommandCall, plan: HandOverPlan) -> None:
    document = plan.document()
    call.output.document(document)
    if call.as_json:
        return
    for line in plan.lines():
        call.output.line(line)
    for records, columns in ((document["topics"], _TOPICS), (document["groups"], _GROUPS)):
        if records:
            call.output.line("")
            call.output.table(records, columns, "")


# --- commands -----------------------------------------------------------------------------------


@command(
    _HAND_OVER,
    "plan",
    "hand-over plan --from ./data --to mq1:9876",
    "hand-over plan --json",
    without=("name_server",),
)
def plan(call: CommandCall, sides: Sides = Sides(), rate: Rate = None) -> None:
    """Show what would move, what would stay until when, what is impossible, and what the new broker lacks.

    It reads both brokers, and changes nothing.
    """
    with sides.both(call) as (old, new, settings):
        found = _plan(call, old.broker, new.broker, settings, rate)
    _print_plan(call, found)


@command(
    _HAND_OVER,
    "start",
    "hand-over start --from mq-old:9876 --to mq1:9876",
    "hand-over start --dry-run",
    without=("name_server",),
)
def start(call: CommandCall, sides: Sides = Sides(), rate: Rate = None, *, confirmation: Confirmation) -> None:
    """Create the missing topics and groups at the new broker, and let the application's mover begin.

    Messages move while an application with mqtemplate.hand-over.from runs. It starts a hand-over by itself, too:
    this command is for those who want to see the plan first.
    """
    from mqtemplate.handover.control import HandOverStarted

    with sides.both(call) as (old, new, settings):
        found = _plan(call, old.broker, new.broker, settings, rate)
        if not call.as_json:
            _print_plan(call, found)
        change = HandOverStarted(old.open_for_changes(), new.open_for_changes(), found)
        result = call.make(change, confirmation)
    if result is not None:
        call.output.document({"id": result.facts["id"], "created_topics": result.facts["created_topics"]})
        call.output.line(f"started; set mqtemplate.hand-over.from to {found.source}, and restart the application")


@command(
    _HAND_OVER,
    "status",
    "hand-over status",
    "hand-over status --from ./data --json",
    without=("name_server",),
)
def status(call: CommandCall, sides: Sides = Sides(), actuator: ActuatorOptions = FROM_CONFIGURATION) -> None:
    """Show the progress, the rate, what is left by day, and the lag of each group at both brokers.

    With --url the application tells it; then the rate is that of its last seconds.
    """
    document = actuator.client(call).get("handover") if actuator.url is not None else _status(call, sides)
    if not document:
        call.output.document({"phase": None})
        call.output.note("there is no hand-over from this broker; start one with: mqtemplate hand-over start")
        return
    _print_status(call, document)


def _status(call: CommandCall, sides: Sides) -> dict[str, Any] | None:
    from mqtemplate.handover.control import read_status

    with sides.old(call) as old:
        try:
            with access_of(sides.settings(call)) as new:
                found = read_status(old.broker, new.broker)
        except MQTemplateError as exc:  # the old broker has a status without it
            call.output.note(f"the new broker is unknown: {exc}")
            found = read_status(old.broker, None)
    return None if found is None else found.document()


def _print_status(call: CommandCall, document: dict[str, Any]) -> None:
    from mqtemplate.handover.control import status_lines

    call.output.document(document)
    if call.as_json:
        return
    for line in status_lines(document):
        call.output.line(line)
    if document["groups"]:
        call.output.line("")
        call.output.table(document["groups"], _LAGS, "")


def _change(call: CommandCall, sides: Sides, actuator: ActuatorOptions, name: str, confirmation: Confirmation) -> None:
    """Change the phase in the old broker; if another process has its directory open, through its actuator."""
    from mqtemplate.handover.control import HandOverAction, HandOverChanged

    action = HandOverAction(name)
    if actuator.url is None:
        with sides.old(call) as old:
            try:
                broker = old.open_for_changes()
            except StoreLockedError:
                if not call.settings().mqtemplate.management.port:
                    raise
            else:
                change = HandOverChanged(broker, action)
                result = call.make(change, confirmation)
                if result is not None:
                    call.output.document({"phase": result.facts["phase"]})
                    call.output.line(f"{result.text}. {change.note}")
                return
    client = actuator.client(call)
    preview = client.post(f"handover/{name}", {"dryRun": True})
    for line in (preview["title"], *preview["notes"]):
        call.output.note(line)
    if confirmation.dry_run:
        call.output.note("nothing was changed")
        return
    call.confirm(f"{preview['title']}?", yes=confirmation.yes)
    done = client.post(f"handover/{name}", {})
    call.output.document({"phase": done["phase"]})
    call.output.line(f"the phase is {done['phase']}")


@command(_HAND_OVER, "pause", "hand-over pause", "hand-over pause --url http://app:8081", without=("name_server",))
def pause(
    call: CommandCall,
    sides: Sides = Sides(),
    actuator: ActuatorOptions = FROM_CONFIGURATION,
    *,
    confirmation: Confirmation,
) -> None:
    """Let no more messages move. Sends and listeners go on as before."""
    _change(call, sides, actuator, "pause", confirmation)


@command(_HAND_OVER, "resume", "hand-over resume --yes", without=("name_server",))
def resume(
    call: CommandCall,
    sides: Sides = Sides(),
    actuator: ActuatorOptions = FROM_CONFIGURATION,
    *,
    confirmation: Confirmation,
) -> None:
    """Let messages move again, after a pause or during an abort."""
    _change(call, sides, actuator, "resume", confirmation)


@command(_HAND_OVER, "confirm", "hand-over confirm", "hand-over confirm --from ./data", without=("name_server",))
def confirm(
    call: CommandCall,
    sides: Sides = Sides(),
    actuator: ActuatorOptions = FROM_CONFIGURATION,
    *,
    confirmation: Confirmation,
) -> None:
    """Check that the old broker is empty, and seal it: it refuses messages from then on."""
    _change(call, sides, actuator, "confirm", confirmation)


@command(_HAND_OVER, "abort", "hand-over abort", without=("name_server",))
def abort(
    call: CommandCall,
    sides: Sides = Sides(),
    actuator: ActuatorOptions = FROM_CONFIGURATION,
    *,
    confirmation: Confirmation,
) -> None:
    """Move the messages back to the old broker."""
    _change(call, sides, actuator, "abort", confirmation)


@command(
    _HAND_OVER,
    "run",
    "hand-over run --from ./data --to mq1:9876",
    "hand-over run --from ./data --to mq1:9876 --rate 500 --yes",
    without=("name_server",),
)
def run(call: CommandCall, sides: Sides = Sides(), rate: Rate = None, *, confirmation: Confirmation) -> None:
    """Move everything of a stopped application: topics, offsets of groups, unread and pending messages.

    After Ctrl-C or a kill the same command goes on: no message is lost, and none is sent twice.
    """
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.handover.control import StoreMoved
    from mqtemplate.handover.run import DEFAULT_RATE

    with sides.both(call) as (old, new, settings):
        owner = old.open_for_changes()
        if not isinstance(owner, EmbeddedBroker):
            raise UnsupportedError(
                f"{settings.mqtemplate.hand_over.from_} is a server, and a run moves a store directory: stop the "
                "server and name its directory, or let its applications move while they run: mqtemplate hand-over start"
            )
        found = _plan(call, owner, new.open_for_changes(), settings, rate or DEFAULT_RATE)
        if not call.as_json:
            _print_plan(call, found)
        stop = threading.Event()
        change = StoreMoved(owner, new.broker, found, stop, lambda reason: call.output.note(f"waiting: {reason}"))
        with _stopped_by_signals(stop):
            result = call.make(change, confirmation, "moving")
    if result is None:
        return
    report: RunReport = result.details
    call.output.document(report.document())
    if not call.as_json:
        _print_report(call, report, found)
    if report.is_stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)


@contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set *stop* at the first SIGINT or SIGTERM; a second one ends the process at once."""
    before: dict[int, Any] = {}

    def on_signal(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, before[number])

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_report(call: CommandCall, report: RunReport, plan: HandOverPlan) -> None:
    out: Callable[[str], None] = call.output.line
    out(f"{report.copied:,} ready messages and {report.moved:,} pending messages moved to {plan.target}")
    if report.repeated:
        out(f"{report.repeated:,} had been sent by the run before, and were not sent again")
    if report.groups:
        out(f"offsets of {len(report.groups)} groups set: {', '.join(sorted(report.groups))}")
    for msg_id, reason in report.refused.items():
        out(f"REFUSED: message {msg_id} stays in the directory: {reason}")
    again = f"mqtemplate hand-over run --from {plan.source.removeprefix('embedded:')} --to '{plan.target}'"
    if report.is_stopped:
        out(f"stopped; {report.left:,} pending messages are left. Go on with: {again}")
    elif report.left and report.in_range_ms is not None:
        out(
            f"{report.left:,} pending messages stay: the next one comes into the range of the new broker on "
            f"{time_text(report.in_range_ms)}. Then run again: {again}"
        )
        out(f"or start the application with mqtemplate.hand-over.from: {plan.source}, which moves them in time")
    elif report.left:
        out(f"{report.left:,} pending messages stay: the new broker has no timers. Start the application with")
        out(f"mqtemplate.hand-over.from: {plan.source}, and the directory releases them when they are due")
    else:
        out(f"the directory is empty; seal it with: mqtemplate hand-over confirm --from {plan.source}")
