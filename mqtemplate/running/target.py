"""Options of one run of an application, as its processes pass them on, and its import by its name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from mqtemplate.callables import takes_no_arguments
from mqtemplate.context.application import MQApplication
from mqtemplate.context.components import is_injectable, is_listener
from mqtemplate.context.config.files import below_environment, read_env_file
from mqtemplate.context.settings.source import PROCESS, CommandLine
from mqtemplate.errors import ConfigurationError, DependencyError
from mqtemplate.running.hosting import ProcessApplication, process_of
from mqtemplate.user_code import did_you_mean

READY = b"ready\n"
"""Line that a worker writes when its application is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of ``mqtemplate run`` that each process of the application needs.

    Attributes:
        target: Name of the application, ``module:attribute``.
        profiles: Active profiles; empty: the profiles of the configuration.
        env_file: File with environment variables; variables of the process win.
        listeners: Names of the listeners to run; empty for all.
        name_server: Broker, instead of the one in the configuration.
        access_key: Account of the processes on that broker.
        worker: Number of the worker that gets the options.
        group: Folder in which the workers find each other, for their management.
    """

    target: str
    profiles: tuple[str, ...] = ()
    env_file: str | None = None
    listeners: tuple[str, ...] = ()
    name_server: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    worker: str | None = None
    group: str | None = None

    def to_json(self) -> str:
        """Return the options as one line. An account in them must not get into the arguments of a process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunOptions:
        """Return the options that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)

    def keys(self) -> dict[str, object]:
        """Return the settings that the options give."""
        keys: dict[str, object] = {"mqtemplate.listener.enabled": True}
        if self.name_server is not None:
            keys["rocketmq.name-server"] = self.name_server
        if self.access_key is not None:
            for section in ("producer", "consumer", "pull-consumer"):
                keys[f"rocketmq.{section}.access-key"] = self.access_key
                keys[f"rocketmq.{section}.secret-key"] = self.secret_key
        if self.listeners:
            keys["mqtemplate.listener.only"] = list(self.listeners)
        return keys


_EXPECTED = (
    "give module:name of an MQApplication, an MQTemplate or a function that returns one, or a module with listeners, "
    "such as shop.main:app"
)


def load_application(options: RunOptions) -> MQApplication:
    """Import an application with these options in force. This process belongs to it from now on.

    Raises:
        ConfigurationError: The file of variables is invalid, or the program ignores the chosen broker.
        DependencyError: There is no such application.
    """
    if options.env_file is not None:
        os.environ.update(below_environment(read_env_file(Path(options.env_file))))
    PROCESS.given = CommandLine(
        options.profiles, options.keys(), is_run=True, worker=options.worker, group=options.group
    )
    app = import_application(options.target)
    if options.name_server is not None and app.settings.rocketmq.name_server != options.name_server:
        raise ConfigurationError(
            f"{options.target} was created with finished settings, so it would use the broker "
            f"{app.settings.rocketmq.name_server!r} and not {options.name_server!r}; create it with "
            "load_settings(...), or from application.yml"
        )
    return app


def import_application(target: str) -> MQApplication:
    """Return the application that ``module:attribute`` or ``module`` names, from the working directory.

    The attribute is an `MQApplication`, a web application with one, or a function without parameters that returns one
    of these. A module without an attribute has one `MQApplication`, or else components for one.

    Raises:
        DependencyError: The module or attribute is missing, or is not an application.
        Exception: The module raised it when it was imported.
    """
    module_name, colon, path = target.partition(":")
    if not module_name or (colon and not path):
        raise DependencyError(f"{target!r} names no application; {_EXPECTED}")
    module = _import(module_name)
    return _in_module(module, target) if not colon else _application(_attribute(module, path, target), target)


def _import(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    try:
        spec = find_spec(name)
    except (ModuleNotFoundError, ValueError):  # a package that contains it is missing, or the name is not valid
        spec = None
    if spec is None:
        near = did_you_mean(name, [each.name for each in iter_modules([folder])], _EXPECTED)
        raise DependencyError(f"there is no module {name!r} in {folder} or among the installed ones; {near}")
    return import_module(name)


def _attribute(module: ModuleType, path: str, target: str) -> Any:
    found: Any = module
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            names = _names_of_applications(module)
            there_is = ", ".join(names) or "no MQApplication and no MQTemplate"
            known = {name: f"{module.__name__}:{name}" for name in (*names, *_functions_of(module))}
            hint = did_you_mean(path, known, _EXPECTED, written=known)
            raise DependencyError(
                f"{target!r}: {module.__name__} has no attribute {path!r} (there is: {there_is}); {hint}"
            ) from None
    return found


def _in_module(module: ModuleType, target: str) -> MQApplication:
    names = _names_of_applications(module)
    if len(names) > 1:
        raise DependencyError(
            f"{target} has several applications: {', '.join(names)}; name one, as {target}:{names[0]}"
        )
    return _application(getattr(module, names[0]), target) if names else MQApplication(module)


def _names_of_applications(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, MQApplication | ProcessApplication)]


def _functions_of(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isroutine(value) and not name.startswith("_")]


def _application(found: Any, target: str) -> MQApplication:
    if (known := _known(found)) is not None:
        return known
    if isinstance(found, ModuleType):
        return _in_module(found, target)
    if inspect.isclass(found) or is_listener(found) or (inspect.isroutine(found) and is_injectable(found)):
        return MQApplication(found)
    if inspect.isroutine(found):
        if not takes_no_arguments(found):
            raise DependencyError(f"{target} is a function that needs arguments; {_EXPECTED}")
        created = found()
        if (known := _known(created)) is not None:
            return known
        raise DependencyError(f"{target}() returned {_described(created)}, which has no messages; {_EXPECTED}")
    raise DependencyError(f"{target} is {_described(found)}, which has no messages; {_EXPECTED}")


def _known(found: Any) -> MQApplication | None:
    """Return an application, or a new one of an object of a web framework that has one; None for anything else."""
    if isinstance(found, MQApplication):
        return found
    process = process_of(found)
    return None if process is None else process.application_to_run()


def _described(value: object) -> str:
    name = f"a {type(value).__name__}"
    return f"{name} (a web application runs in its own server, such as uvicorn)" if callable(value) else name
