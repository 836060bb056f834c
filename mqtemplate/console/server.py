"""The HTTP server of the console: handlers by the prefix of their paths, on one address; and the management address of
an application, which one of its processes serves for all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from mqtemplate.console.actuator import MAX_BODY_BYTES, Actuator
from mqtemplate.console.group import (
    LockedFile,
    ProcessGroup,
    group_folder,
    joined_group,
    take_name,
)
from mqtemplate.console.merging import MergedDocuments
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.features import ManagementSettings
from mqtemplate.context.settings.source import PROCESS
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import EventLogger, get_logger
from mqtemplate.extras import install_command
from mqtemplate.http.exchange import HttpHandler, HttpRequest, HttpResponse, below
from mqtemplate.http.server import HttpServer

MOUNT = "/dashboard"
"""Path of the dashboard on the management port."""
MAX_FORM_BYTES = 1024 * 1024
_ACTUATOR = "/actuator"
_MAX_CONNECTIONS = 64
_MAX_ACTUATOR_CONNECTIONS = 16

_log = get_logger("mqtemplate.actuator")

_TAKEOVER_S = 1.0
"""Time between two looks whether the process that serves the address has ended."""
_REFRESH_S = 60.0


def check_installed() -> None:
    """Check that the template library of the dashboard is installed.

    Raises:
        ConfigurationError: It is missing.
    """
    if find_spec("jinja2") is None:
        raise ConfigurationError(f"the dashboard needs jinja2: {install_command('dashboard')}")


class ConsoleServer(HttpServer):
    """Serves handlers on one address. Idle connections are closed after 10 s, or earlier for new ones.

    Args:
        handlers: Prefix of paths -> handler of the requests below it; the empty prefix has all paths.
        part: Name of the server in its events and threads, such as ``management``.
        facts: Fields of the event of its start, beside the address.

    Attributes:
        name: Name as a part of an application.
    """

    def __init__(
        self,
        handlers: Mapping[str, HttpHandler],
        host: str,
        port: int,
        *,
        part: str,
        events: EventLogger,
        max_connections: int = _MAX_CONNECTIONS,
        max_body_bytes: int = MAX_FORM_BYTES,
        urgent_path: str | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            self._handle,
            host,
            port,
            thread_name=f"mqtemplate-{part}",
            events=events,
            event=part,
            max_connections=max_connections,
            max_body_bytes=max_body_bytes,
            urgent_path=urgent_path,
        )
        self.name = f"{part} server"
        self._handlers = dict(handlers)
        self._facts = dict(facts or {})

    def _handle(self, request: HttpRequest) -> HttpResponse:
        for mount, handler in self._handlers.items():
            path = below(request.path, mount)
            if path is not None:
                return handler(dataclasses.replace(request, path=path, mount=mount))
        return HttpResponse(404, f"there is: {', '.join(self._handlers)}\n".encode())

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        super().start()
        self.events.info(f"{self.event}.started", address=str(self.address), **self._facts)


class ManagementServer(ConsoleServer):
    """Serves an actuator on 16 connections. Requests for the health are served beside the 16.

    Args:
        port: 0 for a free one.
        mounted: Further handlers by the prefix of their paths, such as ``/dashboard``; then 64 connections are allowed.
    """

    def __init__(
        self,
        actuator: Actuator,
        port: int,
        host: str = "127.0.0.1",
        mounted: Mapping[str, HttpHandler] | None = None,
    ) -> None:
        super().__init__(
            {_ACTUATOR: actuator.handle, **(mounted or {})},
            host,
            port,
            part="management",
            events=_log,
            max_connections=_MAX_CONNECTIONS if mounted else _MAX_ACTUATOR_CONNECTIONS,
            max_body_bytes=MAX_FORM_BYTES if mounted else MAX_BODY_BYTES,
            urgent_path=f"{_ACTUATOR}/health",
            facts={"endpoints": ",".join(actuator.endpoints)},
        )

    def start(self) -> None:
        try:
            super().start()
        except ConfigurationError as exc:
            raise ConfigurationError(f"mqtemplate.management: {exc}") from exc


# --- the address --------------------------------------------------------------------------------


class TargetFile:
    """File with an address for Prometheus' ``file_sd_configs``, which all users may read.

    Its name is the lowest number that is free in the folder.

    Args:
        address: Address that is scraped.
        is_shared: The metrics at the address have the names of the processes. Otherwise the number is the label.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, folder: Path, address: str, *, is_shared: bool) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)  # Prometheus may be another user: not 0700
            name, self._lock = take_name(folder, None)
            self._path = folder / f"{name}.json"
            labels = {} if is_shared else {"mqtemplate_worker": name}
            fresh = folder / f".{name}.new"  # only the owner of the lock writes it
            fresh.write_text(json.dumps([{"targets": [address], "labels": labels}]), "utf-8")
            fresh.chmod(0o644)
            fresh.replace(self._path)  # Prometheus must not read a part of it
        except OSError as exc:
            raise ConfigurationError(
                f"mqtemplate.management.targets-dir: {folder} cannot be written ({exc.strerror or exc}); give a folder "
                "that this user can write and Prometheus can read"
            ) from exc

    def remove(self) -> None:
        """Remove the file: the address is not served any more."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._lock.release()


class ManagementAddress:
    """Serves the management address while an application runs, for all its processes.

    The first process listens on the address. When it ends, another one does within a second. A free port (0) is for one
    process alone, unless ``mqtemplate run`` has started it as a worker: then the parent serves the address.

    Args:
        mounted: Further handlers by the prefix of their paths, such as ``/dashboard``.
        group: The processes of the application; None: this one is alone.
        serves: False if another process always serves the address.
    """

    def __init__(
        self,
        actuator: Actuator,
        settings: ManagementSettings,
        mounted: Mapping[str, HttpHandler],
        group: ProcessGroup | None,
        *,
        serves: bool = True,
    ) -> None:
        assert settings.port is not None, "without a port nothing is served"
        self._settings = settings
        self._group = group
        self._serves = serves
        self._lock: LockedFile | None = None
        self._target: TargetFile | None = None
        self._server = ManagementServer(actuator, settings.port, settings.address, mounted=mounted)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_served_here = False
        if group is not None:
            actuator.documents = MergedDocuments(actuator, group)

    @property
    def address(self) -> str:
        """The address, with the real port if this process serves it."""
        return str(self._server.address)

    def start(self) -> None:
        """Serve the address, or wait for the end of the process that does.

        Raises:
            ConfigurationError: The address cannot be used.
        """
        if self._group is None:
            if self._serves:
                self._serve()
            return
        self._group.start()
        try:
            if self._serves and not self._serve_if_free(self._group):
                self._group.note_others()
                _log.info("management.shared", address=self.address, worker=self._group.name)
        except BaseException:
            self._group.stop()
            raise
        self._thread = threading.Thread(target=self._run, args=(self._group,), name="mqtemplate-address", daemon=True)
        self._thread.start()

    def _serve_if_free(self, group: ProcessGroup) -> bool:
        lock = LockedFile.take(group.folder / "address.lock")
        if lock is None:
            return False
        try:
            self._serve()
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        return True

    def _serve(self) -> None:
        self._server.start()
        if self._settings.targets_dir is not None:
            try:
                folder = Path(self._settings.targets_dir)
                self._target = TargetFile(folder, self._scraped(), is_shared=self._group is not None)
            except ConfigurationError:
                self._server.stop()
                raise
        self.is_served_here = True

    def _scraped(self) -> str:
        """Return the address as another program reaches it."""
        found = self._server.address
        return str(found._replace(ip=socket.gethostname())) if found.ip in ("0.0.0.0", "::") else str(found)

    def _run(self, group: ProcessGroup) -> None:
        refreshed, is_reported = time.monotonic(), False
        while not self._stop.wait(_TAKEOVER_S if self._serves and not self.is_served_here else _REFRESH_S):
            try:
                if time.monotonic() - refreshed >= _REFRESH_S:
                    refreshed = time.monotonic()
                    group.refresh()
                    if self._lock is not None:
                        self._lock.refresh()
                if self._serves and not self.is_served_here:
                    self._serve_if_free(group)
            except (OSError, ConfigurationError) as exc:
                if not is_reported:
                    _log.warning("management.not_served", reason=str(exc))
                is_reported = True

    def stop(self) -> None:
        """Stop serving, and leave the group."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._server.stop()
        if self._target is not None:
            self._target.remove()
        if self._lock is not None:
            self._lock.release()
        if self._group is not None:
            self._group.stop()


def management_address(
    settings: AppSettings, actuator: Actuator, mounted: Mapping[str, HttpHandler], name: str | None = None
) -> ManagementAddress:
    """Return the management address of an application, or of a broker, in this process. It is not served yet.

    Args:
        name: Name of the process beside others; None for the lowest free number.
    """
    management, given = settings.mqtemplate.management, PROCESS.given
    if given.group is not None:
        group = joined_group(actuator, management, Path(given.group), given.worker, is_several=True)
        return ManagementAddress(actuator, management, mounted, group, serves=False)
    folder = group_folder(settings) if management.port else None
    group = None if folder is None else joined_group(actuator, management, folder, name)
    if group is None and management.port:
        _log.warning("management.not_shared", advice="set TMPDIR to a folder that this user can write")
    return ManagementAddress(actuator, management, mounted, group)
