"""The sources of the settings in their order, and the explanation of all settings, which hides secrets."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mqtemplate.context.config.binding import bind, check_names
from mqtemplate.context.config.configuration import Configuration, bind_environment
from mqtemplate.context.config.files import ENV_FILE, YamlDocument, read_toml, split_names, with_env_file
from mqtemplate.context.config.masking import HIDDEN, masked
from mqtemplate.context.config.placeholders import Placeholders
from mqtemplate.context.config.schema import drop_empty, field_named, fields_of, is_secret, is_section
from mqtemplate.context.config.tree import (
    UNSET,
    ConfigNode,
    ConfigOrigins,
    canonical_key,
    insert_mapping,
    is_empty_text,
    kebab,
    same_key,
)
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.rocketmq import ClusterAddresses, ProxyAddress, parse_name_server
from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import absolute_path
from mqtemplate.user_code import nearest

_NEAR = 0.87  # "rocketmqq", "rokcetmq", "mqtemplates"; not "rocket"
_EXTENSIONS = ("yml", "yaml", "toml")
_PROFILES_KEY = ("mqtemplate", "profiles", "active")


def load_settings(
    config_folder: Path | str | None = None,
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | ConfigNode | None = None,
    *,
    for_server: bool = False,
) -> AppSettings:
    """Read the configuration of an application, or of a server.

    They may share the files. Of keys that only the other one reads, the names are checked; their values may need
    variables that this program does not have.

    A later source wins over an earlier one: ``application.yml`` or ``.toml``, then ``application-{profile}.yml`` in the
    order of the profiles, then ``.env``, the environment, *arguments*, and the options of ``mqtemplate run``.

    Args:
        config_folder: Folder of the files; by default the working directory. A folder without files is allowed.
        profiles: Active profiles; by default ``mqtemplate.profiles.active`` in *arguments*, else
            ``MQTEMPLATE_PROFILES_ACTIVE``, else the key in ``application.yml``.
        environment: Environment variables; by default of the process, and of the file ``.env`` in the folder.
        arguments: Keys that the program sets, dotted or nested, in any spelling; or a tree with their origins.
        for_server: The program is the server of ``mqtemplate broker``.

    Raises:
        ConfigurationError: The configuration is invalid; the error lists all problems with file, line and nearest key.
    """
    configuration = _configuration(_existing_folder(config_folder), profiles, environment, arguments)
    try:
        return _settings(configuration, configuration.root)
    except ConfigurationError:
        shared = _shared_settings(configuration, for_server=for_server)
        if shared is None:
            raise
        return shared


def _configuration(
    folder: Path,
    profiles: Sequence[str],
    environment: Mapping[str, str] | None,
    arguments: Mapping[str, object] | ConfigNode | None,
) -> Configuration:
    """Read all sources; arguments as `load_settings`."""
    variables = with_env_file(folder) if environment is None else environment
    bound = bind_environment(AppSettings, variables)
    overlay = arguments if isinstance(arguments, ConfigNode) else ConfigNode()
    if not isinstance(arguments, ConfigNode):
        insert_mapping(overlay, arguments or {}, "argument settings")
    files = _Files(folder)
    given = PROCESS.given.profiles or tuple(profiles)
    active = given or _profiles_of(overlay) or _profiles_of(bound.root) or files.default_profiles()
    root = files.merged(active)
    root.merge(bound.root)
    above = drop_empty(overlay.copy(), AppSettings)  # what wins over the environment
    PROCESS.given.apply(root, above)
    if active:  # as a key, so that the settings contain the active profiles whatever named them
        in_force = ConfigNode()
        in_force.put(_PROFILES_KEY, list(active), "profiles in force")
        above.merge(in_force)
    root.merge(above.copy())
    origins = ConfigOrigins(
        files=tuple(files.read),
        profiles=active,
        unmatched_profiles=tuple(name for name in active if name not in files.mentioned_profiles),
        unused_variables=bound.unused,
        root=root,
        folder=files.folder,
    )
    return Configuration(root, variables, origins, above)


def read_again(settings: AppSettings) -> AppSettings:
    """Read the files of settings again, with the same folder, profiles, environment and arguments.

    Settings that were created without files stay as they are.

    Raises:
        ConfigurationError: As `load_settings`.
    """
    keys = settings.keys
    if keys is None or keys.origins.folder is None:
        return settings
    folder, variables = keys.origins.folder, keys.environment
    is_own = variables is os.environ or (folder / ENV_FILE).is_file()
    return load_settings(folder, keys.origins.profiles, None if is_own else variables, keys.arguments.copy())


def changed_keys(before: AppSettings, after: AppSettings) -> list[str]:
    """Return the keys whose values differ, as a file writes them, and no value: it may be a secret."""
    old, new = dict(_values(before)), dict(_values(after))
    return [key for key in {**old, **new} if old.get(key, UNSET) != new.get(key, UNSET)]


def _values(settings: AppSettings) -> Iterator[tuple[str, object]]:
    yield from _values_below(settings, ())
    for path, node in settings.origins.root.leaves():
        if field_named(type(settings), path[0]) is None:
            yield ".".join(path), node.value


def _values_below(section: object, path: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    for name in fields_of(type(section)):
        value, at = getattr(section, name), (*path, kebab(name))
        if is_section(type(value)):
            yield from _values_below(value, at)
        else:
            yield ".".join(at), value


def _settings(configuration: Configuration, root: ConfigNode) -> AppSettings:
    """Return the settings.

    Args:
        root: The keys of the library, and others.
    """
    _refuse_near_sections(root)
    binding = bind(_ours(root), AppSettings, Placeholders(configuration.lookup), empty_is_given=False)
    try:
        return AppSettings(configuration, **binding.values)
    except ValidationError as exc:
        raise binding.explain(exc) from None  # pydantic's own text may contain a secret


def _ours(root: ConfigNode) -> ConfigNode:
    return ConfigNode(children={key: node for key, node in root.children.items() if field_named(AppSettings, key)})


_NAME_SERVER = "rocketmq.name-server"
_STORE_PATH = ("mqtemplate", "broker", "store-path")
_OF_SERVERS = (("mqtemplate", "server"), _STORE_PATH)
"""Keys that an application of a cluster does not read."""
_OF_APPLICATIONS = (
    ("rocketmq",),
    *(("mqtemplate", name) for name in ("middlewares", "listener", "schedules", "spark", "cluster")),
)
"""Keys that a server does not read."""


def _shared_settings(configuration: Configuration, *, for_server: bool) -> AppSettings | None:
    """Return the settings without the keys that only another program reads; None if there are no such keys.

    Raises:
        ConfigurationError: The settings are invalid nevertheless, or one of those keys does not exist.
    """
    if not for_server and not _is_of_cluster(configuration):
        return None
    root, of_others = configuration.root.copy(), ConfigNode()
    for path in _OF_APPLICATIONS if for_server else _OF_SERVERS:
        for node in _remove(root, path):
            of_others.put(path, UNSET, node.origin).merge(node)
    if not of_others.children:
        return None
    check_names(of_others, AppSettings)
    origins = dataclasses.replace(configuration.origins, root=root)
    without = Configuration(configuration.root, configuration.environment, origins, configuration.arguments)
    return _settings(without, root)


def _is_of_cluster(configuration: Configuration) -> bool:
    """Return True if the settings choose a cluster, such as our server."""
    found = configuration.lookup(_NAME_SERVER)
    try:
        choice = None if found is None else Placeholders(configuration.lookup).resolve(*found)
        return isinstance(choice, str) and isinstance(parse_name_server(choice), ClusterAddresses | ProxyAddress)
    except (ConfigurationError, ValueError):
        return False  # the error that is raised has the reason


def _refuse_near_sections(root: ConfigNode) -> None:
    """Refuse sections that are probably ours with a typing error: their keys would have no effect.

    Raises:
        ConfigurationError: It names the section that is meant.
    """
    ours = {canonical_key(name): name for name in fields_of(AppSettings)}
    for key, node in root.children.items():
        spring = node.find(("rocketmq",)) if same_key(key, "spring") else None
        if spring is not None:
            raise ConfigurationError(
                f"{spring.origin}: {key}.rocketmq is not a section, its keys would have no effect; "
                "write rocketmq: without spring: above it, as rocketmq-spring does"
            )
        near = nearest(canonical_key(key), ours, cutoff=_NEAR)
        if near is not None and canonical_key(key) not in ours:
            raise ConfigurationError(
                f"{_first_origin(node)}: {key} is not a section, its keys would have no effect; "
                f"did you mean '{ours[near]}'? A section of your own needs a name that differs more"
            )


def _first_origin(node: ConfigNode) -> str:
    return node.origin or next((leaf.origin for _, leaf in node.leaves()), "configuration")


class _Files:
    """The files of a folder; each is read once.

    Attributes:
        folder: The folder with its full path, for messages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._folder = folder
        self.read: list[str] = []
        self.mentioned_profiles: set[str] = set()
        self._base = self._documents("application")

    def default_profiles(self) -> tuple[str, ...]:
        """Return the profiles that ``application.yml`` activates, outside of documents that are for a profile."""
        found: tuple[str, ...] = ()
        for document in self._base:
            if not document.on_profile:
                found = _profiles_of(document.root) or found
        return found

    def merged(self, profiles: Sequence[str]) -> ConfigNode:
        """Return the keys of all documents that apply to the profiles; later documents win."""
        root = ConfigNode()
        documents = list(self._base)
        for document in self._base:
            self.mentioned_profiles |= {name.removeprefix("!") for name in document.on_profile}
        for profile in profiles:
            own = self._documents(f"application-{profile}")
            if own:
                self.mentioned_profiles.add(profile)
            documents += own
            _refuse_profiles(own)
        _refuse_profiles([document for document in self._base if document.on_profile])
        for document in documents:
            if _applies(document, profiles):
                root.merge(drop_empty(document.root, AppSettings))
        return root

    def _documents(self, stem: str) -> list[YamlDocument]:
        present = [file for ext in _EXTENSIONS if (file := self._folder / f"{stem}.{ext}").is_file()]
        if len(present) > 1:
            raise ConfigurationError(f"{self._folder} has both {present[0].name} and {present[1].name}; keep one")
        if not present:
            return []
        self.read.append(str(present[0]))
        if present[0].suffix == ".toml":
            return [YamlDocument(read_toml(present[0]), ())]
        from mqtemplate.context.config.yaml_files import read_yaml

        return read_yaml(present[0])


def _applies(document: YamlDocument, profiles: Sequence[str]) -> bool:
    if not document.on_profile:
        return True
    return any(name[1:] not in profiles if name.startswith("!") else name in profiles for name in document.on_profile)


def _existing_folder(config_folder: Path | str | None) -> Path:
    folder = absolute_path(config_folder or "")
    if not folder.is_dir():
        raise ConfigurationError(
            f"config_folder {str(config_folder)!r} is not a folder; give the one that holds application.yml"
        )
    return folder


def _profiles_of(root: ConfigNode) -> tuple[str, ...]:
    node = root.find(_PROFILES_KEY)
    return () if node is None or node.value is UNSET else split_names(node.value)


def _refuse_profiles(documents: Sequence[YamlDocument]) -> None:
    for document in documents:
        node = document.root.find(_PROFILES_KEY)
        if node is not None and not node.is_empty:
            raise ConfigurationError(
                f"{node.origin}: mqtemplate.profiles.active cannot stand in a part that is itself for a profile; "
                "move it to the head of application.yml, or set MQTEMPLATE_PROFILES_ACTIVE"
            )


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Options of ``mqtemplate run`` that change settings.

    Attributes:
        profiles: Active profiles; empty: the profiles of the configuration.
        keys: Dotted key -> value.
        is_run: True in a process of ``mqtemplate run``: it belongs to the application alone.
        worker: Number of this worker.
        group: Folder in which the workers of an application find each other; None if they need not.
    """

    profiles: tuple[str, ...] = ()
    keys: Mapping[str, object] = field(default_factory=dict)
    is_run: bool = False
    worker: str | None = None
    group: str | None = None

    def apply(self, below: ConfigNode, arguments: ConfigNode) -> None:
        """Set the keys in the tree of the program's arguments.

        Another broker makes the store directory of the configuration meaningless, so it is removed, also from the
        sources *below* the arguments.
        """
        given = {key: value for key, value in self.keys.items() if not is_empty_text(value)}
        if _NAME_SERVER in given:
            _remove(below, _STORE_PATH)
            _remove(arguments, _STORE_PATH)
        overlay = ConfigNode()
        insert_mapping(overlay, given, "the command line")
        arguments.merge(overlay)


class ProcessCommandLine:
    """The command line of this process. Only a program that owns its process sets it."""

    def __init__(self) -> None:
        self.given = CommandLine()


PROCESS = ProcessCommandLine()


def _remove(root: ConfigNode, path: tuple[str, ...]) -> list[ConfigNode]:
    """Remove a key in all spellings, and return what was there."""
    parent = root.find(path[:-1])
    children = {} if parent is None else parent.children
    return [children.pop(name) for name in list(children) if same_key(name, path[-1])]


_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ExplainedSetting:
    """One setting.

    Attributes:
        key: The key as a file writes it, such as ``rocketmq.name-server``.
        value: A text, number, truth value, list or map, or None; `HIDDEN` for a secret.
        origin: ``application.yml:4``, ``environment ROCKETMQ_NAME_SERVER``, ``argument settings``, or ``default``.
    """

    key: str
    value: Any
    origin: str

    @property
    def is_default(self) -> bool:
        """True if no source sets the key."""
        return self.origin == _DEFAULT


def explain_settings(settings: AppSettings) -> list[ExplainedSetting]:
    """Return all settings of the library, defaults included, then the settings of the application itself."""
    return [*_of_section(settings, type(settings), ()), *_of_application(settings)]


def _of_section(settings: AppSettings, section: type, path: tuple[str, ...]) -> Iterator[ExplainedSetting]:
    value: Any = settings
    for part in path:
        value = getattr(value, part)
    for name in fields_of(section):
        below, at = getattr(value, name), (*path, name)
        if is_section(type(below)):
            yield from _of_section(settings, type(below), at)
            continue
        key = ".".join(map(kebab, at))
        yield ExplainedSetting(key, _plain(below, at, settings), settings.origins.of(key))


def _of_application(settings: AppSettings) -> Iterator[ExplainedSetting]:
    """Yield the keys of sections that belong to the application. A name like ``api-token`` hides its value."""
    for path, node in settings.origins.root.leaves():
        if field_named(type(settings), path[0]) is None:
            hidden = is_secret(type(settings), path)
            key = ".".join(path)
            origin = settings.origin_of(key) or node.origin  # a variable of the environment wins over a file
            value = settings.get(key)
            yield ExplainedSetting(key, HIDDEN if hidden and _may_be_secret(value) else masked(value), origin)


def _plain(value: Any, path: tuple[str | int, ...], settings: AppSettings) -> Any:
    """Return a value as JSON has it, without secrets."""
    if is_secret(type(settings), path) and _may_be_secret(value):
        return HIDDEN
    if is_section(type(value)):
        return {kebab(name): _plain(getattr(value, name), (*path, name), settings) for name in fields_of(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(each, (*path, str(key)), settings) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        return [_plain(each, (*path, index), settings) for index, each in enumerate(value)]
    return masked(value)


def _may_be_secret(value: Any) -> bool:
    return value is not None and not isinstance(value, bool)
