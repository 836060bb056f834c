"""Sources of settings: files, profiles, the environment and arguments, and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from mqtemplate.context.config.binding import bind
from mqtemplate.context.config.command_line import PROCESS
from mqtemplate.context.config.configuration import Configuration
from mqtemplate.context.config.env_file import with_env_file
from mqtemplate.context.config.environment import bind_environment
from mqtemplate.context.config.placeholders import Placeholders
from mqtemplate.context.config.relaxed_keys import canonical_key, same_key
from mqtemplate.context.config.schema import drop_empty, field_named, fields_of
from mqtemplate.context.config.toml_reader import read_toml
from mqtemplate.context.config.tree import UNSET, ConfigNode, ConfigOrigins, insert_mapping
from mqtemplate.context.config.yaml_reader import YamlDocument, read_yaml, split_names
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.errors import ConfigurationError, nearest
from mqtemplate.processes import absolute_path

_NEAR = 0.87  # "rocketmqq", "rokcetmq", "mqtemplates"; not "rocket"
_EXTENSIONS = ("yml", "yaml", "toml")
_PROFILES_KEY = ("mqtemplate", "profiles", "active")


def load_settings(
    config_folder: Path | str | None = None,
    profiles: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | ConfigNode | None = None,
) -> AppSettings:
    """Read the configuration of an application.

    A later source wins over an earlier one: ``application.yml`` or ``.toml``, then ``application-{profile}.yml`` in the
    order of the profiles, then ``.env``, the environment, *arguments*, and the options of ``mqtemplate run``.

    Args:
        config_folder: Folder of the files; by default the working directory. A folder without files is allowed.
        profiles: Active profiles; by default those of ``mqtemplate.profiles.active`` in *arguments*, else in
            ``MQTEMPLATE_PROFILES_ACTIVE``, else in ``application.yml``.
        environment: Environment variables; by default those of the process, and of the file ``.env`` in the folder.
        arguments: Keys that the program sets, dotted or nested, in any spelling; or a tree with their origins.

    Raises:
        ConfigurationError: The configuration is invalid; the error lists all problems with file, line and nearest key.
    """
    folder = _existing_folder(config_folder)
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
    root.merge(drop_empty(overlay, AppSettings))
    PROCESS.given.apply(root)
    if active:  # as a key, so that the settings contain the active profiles whatever named them
        in_force = ConfigNode()
        in_force.put(_PROFILES_KEY, list(active), "profiles in force")
        root.merge(in_force)
    origins = ConfigOrigins(
        files=tuple(files.read),
        profiles=active,
        unmatched_profiles=tuple(name for name in active if name not in files.mentioned_profiles),
        unused_variables=bound.unused,
        root=root,
        folder=files.folder,
    )
    return _settings(Configuration(root, variables, origins))


def _settings(configuration: Configuration) -> AppSettings:
    root = configuration.root
    _refuse_near_sections(root)
    ours = ConfigNode(children={key: node for key, node in root.children.items() if field_named(AppSettings, key)})
    binding = bind(ours, AppSettings, Placeholders(configuration.lookup), empty_is_given=False)
    try:
        return AppSettings(configuration, **binding.values)
    except ValidationError as exc:
        raise binding.explain(exc) from None  # pydantic's own text may contain a secret


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
                f"{spring.origin}: {key}.rocketmq is no section, its keys would have no effect; "
                "write rocketmq: without spring: above it, as rocketmq-spring does"
            )
        near = nearest(canonical_key(key), ours, cutoff=_NEAR)
        if near is not None and canonical_key(key) not in ours:
            raise ConfigurationError(
                f"{_first_origin(node)}: {key} is no section, its keys would have no effect; "
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
        return [YamlDocument(read_toml(present[0]), ())] if present[0].suffix == ".toml" else read_yaml(present[0])


def _applies(document: YamlDocument, profiles: Sequence[str]) -> bool:
    if not document.on_profile:
        return True
    return any(name[1:] not in profiles if name.startswith("!") else name in profiles for name in document.on_profile)


def _existing_folder(config_folder: Path | str | None) -> Path:
    folder = absolute_path(config_folder or "")
    if not folder.is_dir():
        raise ConfigurationError(
            f"config_folder {str(config_folder)!r} is no folder; give the one that holds application.yml"
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
