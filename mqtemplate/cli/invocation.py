"""One call of a command: its common options, the broker that they name, its output; and the program of all commands."""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints
from urllib.parse import urlsplit

import typer
from typer.core import TyperGroup

from mqtemplate.cli.formats import preview_lines
from mqtemplate.cli.output import Output, print_line
from mqtemplate.errors import ConfigurationError, MQTemplateError, escaped
from mqtemplate.processes import is_terminal

if TYPE_CHECKING:
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.console.client import ActuatorClient
    from mqtemplate.context.settings.app import AppSettings
    from mqtemplate.context.settings.rocketmq import ClusterAddresses
    from mqtemplate.operations import BrokerAccess
    from mqtemplate.operations.audit import AuditLog
    from mqtemplate.operations.changes import Change, ChangeResult

ChangeT = TypeVar("ChangeT", bound="Change")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCall:
    """The common options of a command.

    Attributes:
        sort: Column or key by which a table is sorted.
        name_server: Value of ``rocketmq.name-server``; None for the value of the configuration.
        config: Folder of ``application.yml``; None for the current folder.
        folder: Store directory that an option of the command names, whatever its name is; it wins over the others.
    """

    name_server: str | None = None
    config: str | None = None
    profile: Sequence[str] = ()
    as_json: bool = False
    debug: bool = False
    sort: str | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        for option in ("name_server", "config"):
            if not (getattr(self, option) or "").strip():  # of a variable of the shell that is not set
                object.__setattr__(self, option, None)

    @property
    def output(self) -> Output:
        """The output of the command."""
        return Output(as_json=self.as_json, sort=self.sort)

    def settings(self, **arguments: object) -> AppSettings:
        """Return the settings. ``--name-server`` wins over the configuration.

        Args:
            arguments: Further keys, with ``__`` for each dot and ``_`` for each hyphen.
        """
        from mqtemplate.context.settings.rocketmq import ClusterAddresses, EmbeddedStore, parse_name_server
        from mqtemplate.context.settings.source import load_settings

        keys = {name.replace("__", ".").replace("_", "-"): value for name, value in arguments.items()}
        if self.name_server is not None:
            keys["rocketmq.name-server"] = self.name_server
            try:
                choice = parse_name_server(self.name_server)
            except ValueError as exc:
                raise typer.BadParameter(f"{exc}, got {self.name_server!r}", param_hint="--name-server") from exc
            if isinstance(choice, EmbeddedStore) and choice.path is not None:
                keys["mqtemplate.broker.store-path"] = str(choice.path)
            elif isinstance(choice, ClusterAddresses):
                keys |= self._account_at(choice)
        if self.folder is not None:
            keys |= {"rocketmq.name-server": "embedded", "mqtemplate.broker.store-path": self.folder}
        return load_settings(self.config, self.profile, arguments=keys)

    def _account_at(self, cluster: ClusterAddresses) -> dict[str, object]:
        """Return the keys of the account of ``mqtemplate run``, if that serves the store of the configuration there."""
        from mqtemplate.context.settings.source import load_settings
        from mqtemplate.server.local_address import LocalServerAddress

        try:
            store = load_settings(self.config, self.profile).store_path
        except MQTemplateError:
            return {}  # the settings with the other broker are loaded next, and say what is wrong
        local = None if store is None else LocalServerAddress.read(store)
        if local is None or cluster.addresses != (local.address,):
            return {}
        values = {"access-key": local.access_key, "secret-key": local.secret_key}
        return {f"rocketmq.producer.{name}": value for name, value in values.items()}

    @contextmanager
    def access(self, *, create: bool = False) -> Iterator[BrokerAccess]:
        """Open the administration of the broker that the options name.

        Args:
            create: A store directory may be missing; the first change creates it.

        Raises:
            ConfigurationError: The settings are invalid, or the broker has neither a directory nor an address.
            StoreError: The store directory is missing.
            BrokerError: No name server answers.
        """
        with access_of(self.settings(), create=create) as access:
            yield access

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before a change, unless ``--yes`` was given.

        Raises:
            typer.Exit: The answer is no.
            typer.BadParameter: There is no terminal to ask on.
        """
        if yes:
            return
        if not is_terminal(sys.stdin):
            raise typer.BadParameter(
                f"{question} There is no terminal to ask on: add --yes, or --dry-run to see the changes only",
                param_hint="--yes",
            )
        if not typer.confirm(escaped(question), err=True):
            self.output.note("nothing was changed")
            raise typer.Exit(1)

    def audit(self) -> AuditLog:
        """Return the log of changes: the file of the settings, or of this user.

        Raises:
            ConfigurationError: It cannot be written.
        """
        from mqtemplate.clock import SystemClock
        from mqtemplate.operations.audit import AuditLog, default_audit_path

        path = self.settings().mqtemplate.management.audit_log
        return AuditLog(Path(path) if path is not None else default_audit_path(), SystemClock(), user=_user())

    @property
    def place(self) -> str:
        """The broker, for a reader of the log of changes."""
        settings = self.settings()
        is_embedded = cluster_addresses(settings) is None
        return f"embedded:{settings.store_path}" if is_embedded else str(settings.rocketmq.name_server)

    def make(self, change: Change, confirmation: Confirmation, doing: str = "changing") -> ChangeResult | None:
        """Make one change as `make_all` does. Return None if it has no effect, or with ``--dry-run``."""
        return next((result for _, result in self.make_all([change], confirmation, doing)), None)

    def make_all(
        self, changes: Sequence[ChangeT], confirmation: Confirmation, doing: str = "changing"
    ) -> Iterator[tuple[ChangeT, ChangeResult]]:
        """Show the previews of changes, ask once, and make those that have an effect; with ``--dry-run`` none.

        Args:
            changes: One, or one for each of several groups.

        Raises:
            typer.Exit: The answer is no.
            typer.BadParameter: There is no terminal to ask on.
        """
        from mqtemplate.operations.changes import carry_out

        effective = [each for each in changes if not each.preview.is_empty]
        asked = [each for each in effective if each.needs_confirmation]
        shown = effective if confirmation.dry_run else [] if confirmation.yes else asked
        for change in shown:
            if len(changes) > 1:
                self.output.note(f"group {change.target['group']}:")
            for line in preview_lines(change.preview):
                self.output.note(line)
        if confirmation.dry_run:
            if effective:
                self.output.note("nothing was changed")
            return
        if asked:
            titles = (
                [asked[0].title] if len(changes) == 1 else [f"{each.target['group']}: {each.title}" for each in asked]
            )
            self.confirm(f"{'; '.join(titles)}?", yes=confirmation.yes)
        for change in effective:
            with self.output.progress(doing, change.preview.count) as advance:
                result = carry_out(change, self.audit(), place=self.place, on_progress=advance)
            hint = f"; undo it with: mqtemplate undo {result.id}" if change.can_be_undone else ""
            self.output.note(f"this is change {result.id} of the audit log{hint}")
            yield change, result


@contextmanager
def access_of(settings: AppSettings, *, create: bool = False) -> Iterator[BrokerAccess]:
    """Open the administration of the broker that the settings choose; see `CommandCall.access`."""
    from mqtemplate.operations import BrokerAccess, StoreAccess

    cluster = cluster_of(settings)
    if cluster is not None:
        with cluster, BrokerAccess(cluster) as remote:
            yield remote
        return
    if settings.store_path is None:
        raise ConfigurationError(
            "the broker in memory ends with its process, so a command cannot see it; name a store directory or a "
            "server: --name-server embedded:FOLDER, or --name-server host:port"
        )
    with StoreAccess(settings.store_path, settings.mqtemplate.broker, create=create) as access:
        yield access


def cluster_addresses(settings: AppSettings) -> ClusterAddresses | None:
    """Return the addresses of the cluster that the settings choose; None if they choose an embedded broker."""
    from mqtemplate.context.settings.rocketmq import ClusterAddresses

    return settings.broker_choice if isinstance(settings.broker_choice, ClusterAddresses) else None


def cluster_of(settings: AppSettings) -> RemoteBroker | None:
    """Return the client of the cluster that the settings choose, to open; None if they choose an embedded broker.

    Raises:
        ConfigurationError: They choose a proxy.
    """
    if settings.is_proxy:
        raise ConfigurationError(
            "rocketmq.endpoints names a proxy, and RocketMQ's gRPC protocol administers nothing; name the name server "
            "of its brokers: --name-server host:port"
        )
    addresses = cluster_addresses(settings)
    if addresses is None:
        return None
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.context.settings.clients import remote_settings

    chosen = remote_settings(settings)
    if chosen.pending_index is None:
        chosen = dataclasses.replace(chosen, pending_index=_index_path(chosen.name_servers, chosen.namespace))
    return RemoteBroker(chosen)


def _index_path(name_servers: Sequence[str], namespace: str) -> Path | None:
    """Return the file with the pending messages of a cluster, beside the audit log; None for a user without a home."""
    from mqtemplate.operations.audit import default_audit_path

    try:
        folder = default_audit_path().parent
    except ConfigurationError:  # each query reads the brokers then, which needs no file
        return None
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", "_".join(sorted(name_servers)))
    digest = hashlib.sha256("\0".join((*sorted(name_servers), namespace)).encode()).hexdigest()[:8]
    return folder / "pending" / f"{name[:80]}-{digest}.sqlite"


def _user() -> str:
    """Return the name of the user of this process; a user of a container may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # ImportError: Windows without the variables
        return "unknown"


Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Options of a command that changes something."""

    yes: Yes = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the changes, and change nothing")] = False


_NAME_SERVER = typer.Option(
    "--name-server",
    "-n",
    metavar="NAME-SERVER",
    help="the broker: 'embedded:FOLDER', or 'host:port;host:port' (default: rocketmq.name-server of application.yml)",
)
_CONFIG = typer.Option(metavar="FOLDER", help="folder of application.yml (default: the current folder)")
_PROFILE = typer.Option(metavar="NAME", help="a profile; may be repeated")
_JSON = typer.Option("--json", help="write JSON")
_DEBUG = typer.Option("--debug", help="show the traceback of an error")
_SORT = typer.Option(metavar="COLUMN", help="sort by a column, or by a key of --json; -COLUMN for the largest first")

_COMMON: dict[str, tuple[Any, object]] = {
    "name_server": (Annotated[str | None, _NAME_SERVER], None),
    "config": (Annotated[str | None, _CONFIG], None),
    "profile": (Annotated[list[str], _PROFILE], []),
    "as_json": (Annotated[bool, _JSON], False),
    "debug": (Annotated[bool, _DEBUG], False),
}


_LIST: dict[str, tuple[Any, object]] = {**_COMMON, "sort": (Annotated[str | None, _SORT], None)}


# --- the token of an application ----------------------------------------------------------------

_MAX_TOKEN = 4_096
TOKEN_FILE_HELP = "file with the token, - for standard input (default: mqtemplate.management.token)"


def refuse_token(option: typer.CallbackParam, value: str | None) -> None:
    """Refuse a token among the arguments, as earlier versions had it."""
    if value is not None:
        raise typer.BadParameter(
            f"all users of this machine see the arguments of its processes: give {option.opts[0]}-file FILE, or set "
            "MQTEMPLATE_MANAGEMENT_TOKEN"
        )


def token_of(call: CommandCall, file: Path | None) -> str | None:
    """Return the token of a file, or of the configuration; None without one.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    if file is None:
        token = call.settings().mqtemplate.management.token
        return None if token is None else token.get_secret_value()
    try:
        text = sys.stdin.read(_MAX_TOKEN) if str(file) == "-" else _text_of(file)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"the token cannot be read from {file}: {exc}") from exc
    if not text.strip():
        raise ConfigurationError(f"{file} contains no token; write the value of mqtemplate.management.token into it")
    return text.strip()


@dataclass(frozen=True, slots=True)
class ActuatorOptions:
    """Options that name the actuator of an application.

    Attributes:
        token: The option of earlier versions: it is refused with what to do instead.
    """

    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="actuator of the application (default: mqtemplate.management.address and port of application.yml)",
        ),
    ] = None
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help=TOKEN_FILE_HELP)] = None
    token: Annotated[str | None, typer.Option(hidden=True, callback=refuse_token)] = None

    def client(self, call: CommandCall) -> ActuatorClient:
        """Return the client of the actuator that the options or the configuration name.

        Raises:
            ConfigurationError: Neither names one.
        """
        from mqtemplate.console.client import ActuatorClient

        management, url = call.settings().mqtemplate.management, self.url
        if url is None:
            if not management.port:
                raise ConfigurationError(
                    "the application is not known: give --url http://host:port, or set mqtemplate.management.port in "
                    "application.yml"
                )
            host = f"[{management.address}]" if ":" in management.address else management.address
            url = f"http://{host}:{management.port}"
        elif urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise typer.BadParameter(f"must be http://host:port, got {url!r}", param_hint="--url")
        return ActuatorClient(url, token_of(call, self.token_file))


FROM_CONFIGURATION = ActuatorOptions()
"""The actuator that the configuration names."""


def _text_of(file: Path) -> str:
    with file.open(encoding="utf-8") as opened:
        return opened.read(_MAX_TOKEN)


_DEFAULT_COMMAND = "ls"

# --- the program --------------------------------------------------------------------------------

# Plain help: with rich each call for help would take another tenth of a second.
TOP = typer.Typer(
    epilog="docs/cli.md has all commands and exit codes.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""The program: the modules of commands add theirs when they are imported."""


def _show_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        print_line(f"mqtemplate {version('mqtemplate')}")
        raise typer.Exit


@TOP.callback()
def _program(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version")
    ] = False,
) -> None:
    """Delayed messages for Python, with RocketMQ's protocol: commands for operators."""


def command_group(name: str, text: str, *, has_default: bool = False) -> typer.Typer:
    """Add a group of commands to the program, with the first line of its help, and return it.

    Args:
        has_default: Words that name no command of the group are those of its command ``ls``.
    """
    group = typer.Typer(help=text, no_args_is_help=not has_default, cls=_GroupWithDefault if has_default else None)
    TOP.add_typer(group, name=name)
    return group


class _GroupWithDefault(TyperGroup):
    """Group of commands in which ``ls`` may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_named else [_DEFAULT_COMMAND, *args])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        default = self.commands[_DEFAULT_COMMAND]
        words = next(each for each in default.params if each.param_type_name == "argument")
        return [*super().shell_complete(ctx, incomplete), *words.shell_complete(ctx, incomplete)]


def command(
    app: typer.Typer, name: str, *examples: str, without: Sequence[str] = (), is_list: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a function as a command. Its first argument is the `CommandCall`.

    A parameter whose type is a dataclass stands for one option for each field.

    Args:
        examples: Command lines for ``--help``, without the name of the program.
        without: Common options that the command does not have.
        is_list: The command writes a table, which ``--sort`` sorts.
    """
    common = {option: each for option, each in (_LIST if is_list else _COMMON).items() if option not in without}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        bundles: dict[str, tuple[type, list[str]]] = {}
        for each in list(inspect.signature(function, eval_str=True).parameters.values())[1:]:
            if isinstance(each.annotation, type) and is_dataclass(each.annotation):
                options = _options_of(each.annotation)
                bundles[each.name] = each.annotation, [option.name for option in options]
                parameters += options
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters += [_option(option, *given) for option, given in common.items()]

        def run(**arguments: Any) -> None:
            call = CommandCall(**{option: arguments.pop(option) for option in common})
            for bundle, (kind, names) in bundles.items():
                arguments[bundle] = kind(**{option: arguments.pop(option) for option in names})
            function(call, **arguments)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the options from it
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__module__ = function.__module__
        app.command(name, help=_help(function, examples))(run)
        return function

    return decorate


def _options_of(kind: type) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters."""
    hints = get_type_hints(kind, include_extras=True)
    return [_option(field.name, hints[field.name], _default(field)) for field in fields(kind)]


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _option(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _help(function: Callable[..., None], examples: Sequence[str]) -> str:
    text = inspect.getdoc(function) or ""
    if not examples:
        return text
    lines = "\n".join(f"  mqtemplate {example}" for example in examples)
    return f"{text}\n\n\b\nExamples:\n{lines}"  # \b: the lines are not joined


# --- completion of names ------------------------------------------------------------------------

_COMPLETION_S = 2.0


def topic_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin with a text, for the completion of a shell."""
    return _completed(context, incomplete, lambda access: access.admin.readable_topics())


def group_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the groups that begin with a text, for the completion of a shell."""
    return _completed(context, incomplete, lambda access: access.admin.group_names())


def _completed(context: typer.Context, incomplete: str, read: Callable[[BrokerAccess], Sequence[str]]) -> list[str]:
    def names() -> Sequence[str]:
        given = context.params
        call = CommandCall(
            name_server=given.get("name_server"), config=given.get("config"), profile=given.get("profile") or ()
        )
        with call.access() as access:
            return read(access)

    return completed(incomplete, names)


def completed(incomplete: str, read: Callable[[], Sequence[str]]) -> list[str]:
    """Return the names that begin with a text; none after two seconds, or without an answer: a shell shows no error."""
    found: list[str] = []

    def work() -> None:
        with suppress(Exception), redirect_stderr(StringIO()):
            found.extend(each for each in read() if each.startswith(incomplete))

    thread = threading.Thread(target=work, name="mqtemplate-completion", daemon=True)
    thread.start()
    thread.join(_COMPLETION_S)
    return list(found)


def existing_file(path: Path) -> bytes:
    """Return the content of a file that the user names; ``-`` is standard input.

    Raises:
        typer.BadParameter: It cannot be read.
    """
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as exc:
        raise typer.BadParameter(f"{path} cannot be read: {exc.strerror}") from exc


def refuse_dangling_link(path: Path, option: str) -> None:
    """Check the path of a file that a command writes: the target of a link has to exist, as for /dev/stdout.

    Raises:
        typer.BadParameter: It is a link to a missing file, which writing would create elsewhere.
    """
    if path.is_symlink() and not path.exists():
        raise typer.BadParameter(
            f"{path} is a link to {path.readlink()}, which does not exist; name the file itself", param_hint=option
        )
