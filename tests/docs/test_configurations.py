"""Every block of configuration in the documents is read by the program that it is for, or says why it is not.

The blocks are the fenced ones in YAML, TOML, INI and of Docker, in README and docs. A block that no program here can
read has the line ``<!-- not run: reason -->`` before it.
"""

from __future__ import annotations

import configparser
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from uvicorn.main import main as uvicorn_command

from mqtemplate import MQApplication
from mqtemplate.cli.main import _program
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.source import load_settings
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.running.server import local_cluster
from tests.docs.fences import DOCS, ROOT, Fence, fences
from tests.remoting.certificates import Certificates, has_openssl

LANGUAGES = {"yaml", "yml", "toml", "ini", "systemd", "conf", "cfg", "properties", "dockerfile", "xml"}
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SECRET = "a secret of enough characters"
_VARIABLE = re.compile(r"\$\{([A-Z][A-Z_]*)\}")


@dataclasses.dataclass(frozen=True)
class Block:
    """One block, and its page."""

    page: str
    fence: Fence

    @cached_property
    def kind(self) -> str:
        """The program that reads the block."""
        language, text = self.fence.language, self.fence.text
        if language == "yaml":
            first = yaml.safe_load(text.split("\n---\n")[0])
            kinds = {"services": "compose", "apiVersion": "kubernetes", "libraries": "pipeline"}
            return next((kind for key, kind in kinds.items() if key in first), "application")
        if language == "toml":
            return "project" if "[project]" in text else "application"
        if language == "ini" and "[Service]" in text:
            return "systemd"
        return "docker" if language == "dockerfile" else "unknown"


@cache
def blocks() -> list[Block]:
    found = [(page.relative_to(ROOT).as_posix(), fence) for page in PAGES for fence in fences(page)]
    return [Block(page, fence) for page, fence in found if fence.language in LANGUAGES]


def of_kind(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each block of a kind."""
    found = [each for each in blocks() if each.fence.reason is None and each.kind == kind]
    return pytest.mark.parametrize("block", found, ids=[f"{each.page}-{each.fence.line}" for each in found])


def test_every_block_is_read_or_says_why_it_is_not() -> None:
    known = {"application", "compose", "kubernetes", "systemd", "docker", "project", "pipeline"}
    left = [each for each in blocks() if each.fence.reason is None and each.kind not in known]

    assert left == []
    assert known == {each.kind for each in blocks()}


# --- application.yml ------------------------------------------------------------------------------------


def write(folder: Path, block: Block) -> None:
    ending = "toml" if block.fence.language == "toml" else "yml"
    (folder / (block.fence.title or f"application.{ending}")).write_text(block.fence.text, "utf-8")


def profiles_of(block: Block) -> Sequence[str]:
    found = re.fullmatch(r"application-(\w+)\.\w+", block.fence.title or "")
    return [found[1]] if found else []


def variables_of(text: str) -> dict[str, str]:
    """Return values for the variables without a default that a text names."""
    return dict.fromkeys(_VARIABLE.findall(text), SECRET)


@of_kind("application")
def test_an_application_reads_it(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is built as for a start: clients, an embedded broker, the actuator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "shop", types.ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.errors", errors := types.ModuleType("shop.errors"))
    errors.OrderError = OrderError  # type: ignore[attr-defined]
    write(tmp_path, block)
    variables = variables_of(block.fence.text)
    app = MQApplication(config_folder=tmp_path, profiles=profiles_of(block), environment=variables)

    app.check()

    assert app.settings.origins.files  # a file with another name would not be read
    assert app.settings.origins.unmatched_profiles == ()


class OrderError(Exception):
    """An error of the application that the pages name."""


def is_for_server(block: Block) -> bool:
    return "\n  server:" in block.fence.text or "\n  broker:" in block.fence.text


SERVER_BLOCKS = [each for each in blocks() if each.kind == "application" and is_for_server(each)]


@pytest.mark.parametrize("block", SERVER_BLOCKS, ids=lambda each: f"{each.page}-{each.fence.line}")
def test_a_server_starts_with_it(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ports of loopback that the system chooses, in a directory of the test."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, block)
    if "server.pem" in block.fence.text:
        if not has_openssl():
            pytest.skip("there is no openssl command to make certificates with")
        Certificates(tmp_path).issue("server", "IP:127.0.0.1")
    arguments = {"rocketmq.name-server": "embedded", "mqtemplate.broker.store-path": str(tmp_path / "store")}
    settings = load_settings(tmp_path, environment=variables_of(block.fence.text), arguments=arguments, for_server=True)
    any_port = HostAddress("127.0.0.1", 0)
    server = dataclasses.replace(settings.mqtemplate.server, listen=any_port, name_server=any_port)

    with local_cluster(settings, server) as cluster:
        assert cluster.address.port


# --- one file for a server and its applications ----------------------------------------------------------


SHARED = """
rocketmq:
  name-server: 127.0.0.1:9876
  producer: {access-key: shop-app, secret-key: "${SHOP_SECRET}", max-message-size: 8388608}
mqtemplate:
  middlewares: [shop.that.does.not.exist.Audit]
  listener: {retry: [1s]}
  broker: {store-path: ./mq, broker-name: shared}
  server:
    cluster-name: c1
    acl:
      enabled: true
      accounts: [{access-key: administrator, secret-key: "${ADMIN_SECRET}", admin: true}]
"""


def load_shared(folder: Path, text: str, *, for_server: bool, **variables: str) -> AppSettings:
    (folder / "application.yml").write_text(text, "utf-8")
    arguments = {"rocketmq.name-server": "embedded"} if for_server else None
    return load_settings(folder, environment=variables, arguments=arguments, for_server=for_server)


def test_a_server_ignores_the_keys_of_applications(tmp_path: Path) -> None:
    """It has neither their variables nor their code."""
    settings = load_shared(tmp_path, SHARED, for_server=True, ADMIN_SECRET=SECRET)

    assert settings.mqtemplate.server.acl.accounts[0].secret_key.get_secret_value() == SECRET
    assert (settings.mqtemplate.broker.broker_name, settings.store_path) == ("shared", Path.cwd() / "mq")


def test_an_application_ignores_the_keys_of_its_server(tmp_path: Path) -> None:
    text = SHARED.replace("  middlewares: [shop.that.does.not.exist.Audit]\n", "")
    settings = load_shared(tmp_path, text, for_server=False, SHOP_SECRET=SECRET)

    assert settings.rocketmq.name_server == "127.0.0.1:9876"
    assert settings.rocketmq.producer.secret_key is not None
    assert settings.store_path is None
    assert not settings.mqtemplate.server.acl.enabled
    assert settings.origins.of("mqtemplate.server.acl.enabled") == "default"


@pytest.mark.parametrize(
    ("for_server", "right", "wrong", "key", "near"),
    [
        (True, "retry: [", "retri: [", "mqtemplate.listener.retri", "mqtemplate.listener.retry"),
        (True, "max-message", "max-mesage", "rocketmq.producer.max-mesage-size", "rocketmq.producer.max-message-size"),
        (False, "cluster-name", "cluster-nam", "mqtemplate.server.cluster-nam", "mqtemplate.server.cluster-name"),
        (False, "admin: true", "admi: true", "server.acl.accounts[0].admi", "server.acl.accounts[0].admin"),
    ],
)
def test_a_misspelt_key_of_the_other_program_is_refused(
    tmp_path: Path, for_server: bool, right: str, wrong: str, key: str, near: str
) -> None:
    own = {"ADMIN_SECRET": SECRET} if for_server else {"SHOP_SECRET": SECRET}
    assert right in SHARED

    with pytest.raises(ConfigurationError) as refused:
        load_shared(tmp_path, SHARED.replace(right, wrong), for_server=for_server, **own)

    text = str(refused.value)
    assert "application.yml:" in text
    assert f"{key}: no such key; did you mean '" in text
    assert f"{near}'?" in text


def test_a_variable_of_its_own_that_is_missing_is_an_error_of_each_program(tmp_path: Path) -> None:
    for for_server, variable in ((True, "ADMIN_SECRET"), (False, "SHOP_SECRET")):
        with pytest.raises(ConfigurationError, match=f"{variable}.*has no value and no default; set {variable}"):
            load_shared(tmp_path, SHARED, for_server=for_server)


def test_an_embedded_broker_and_a_directory_elsewhere_still_contradict(tmp_path: Path) -> None:
    text = "{rocketmq.name-server: 'embedded:memory', mqtemplate: {broker: {store-path: ./mq}, server: {acl: {}}}}"

    with pytest.raises(ConfigurationError, match="which keeps no files; keep one of the two keys"):
        load_shared(tmp_path, text, for_server=False)


# --- command lines ----------------------------------------------------------------------------------------


def parse(words: Sequence[str]) -> None:
    """Parse the arguments of ``mqtemplate`` or ``uvicorn``, and run nothing.

    An argument that is wrong is an error of click, of which typer has a copy.
    """
    program, *arguments = words
    if Path(program).name == "uvicorn":
        uvicorn_command.make_context("uvicorn", arguments)
        return
    assert Path(program).name == "mqtemplate", words
    command, context = _program(tuple(arguments[:1])), None
    while True:
        context = command.make_context(command.name or "mqtemplate", arguments, parent=context)
        if not hasattr(command, "resolve_command"):
            return
        _, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])


def test_a_wrong_command_line_is_found() -> None:
    with pytest.raises(Exception, match="No such option: --worker"):
        parse(["mqtemplate", "run", "shop.main:app", "--worker", "4"])
    with pytest.raises(Exception, match="No such option '--worker'"):
        parse(["uvicorn", "shop.web:web", "--worker", "4"])


def check_variables(folder: Path, variables: dict[str, str]) -> None:
    """Check the environment of a container: each variable with our prefix sets a key, to a valid value."""
    settings = load_settings(folder, environment=variables)
    assert settings.origins.unused_variables == {}


# --- containers and units ---------------------------------------------------------------------------------


@of_kind("docker")
def test_the_commands_of_a_dockerfile_exist(block: Block) -> None:
    lines = block.fence.text.splitlines()
    commands = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    commands += [shlex.split(line)[1:] for line in lines if line.startswith("RUN mqtemplate ")]

    assert commands
    for words in commands:
        parse(words)


@of_kind("compose")
def test_the_services_of_compose_start_commands_that_exist(block: Block, tmp_path: Path) -> None:
    document = yaml.safe_load(block.fence.text)

    for service in document["services"].values():
        parse(service["command"])
        check_variables(tmp_path, service.get("environment", {}))
        networks = service["networks"]
        assert set(networks) <= set(document["networks"])


PROBE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["httpGet"],
    "properties": {
        "httpGet": {
            "type": "object",
            "additionalProperties": False,
            "required": ["path", "port"],
            "properties": {"path": {"type": "string", "pattern": "^/"}, "port": {"type": "integer"}},
        },
        "periodSeconds": {"type": "integer", "minimum": 1},
        "failureThreshold": {"type": "integer", "minimum": 1},
    },
}
TEXTS = {"type": "array", "items": {"type": "string"}}
CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9-]{1,63}$"},
        "image": {"type": "string"},
        "command": TEXTS,
        "args": TEXTS,
        "env": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
            },
        },
        "startupProbe": PROBE,
        "readinessProbe": PROBE,
        "livenessProbe": PROBE,
        "lifecycle": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "preStop": {
                    "type": "object",
                    "required": ["exec"],
                    "properties": {
                        "exec": {"type": "object", "required": ["command"], "properties": {"command": TEXTS}}
                    },
                }
            },
        },
    },
}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
DEPLOYMENT: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "apps/v1"},
        "kind": {"const": "Deployment"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "template"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "selector": {"type": "object", "properties": {"matchLabels": LABELS}, "required": ["matchLabels"]},
                "template": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["metadata", "spec"],
                    "properties": {
                        "metadata": {"type": "object", "properties": {"labels": LABELS}, "required": ["labels"]},
                        "spec": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["containers"],
                            "properties": {
                                "terminationGracePeriodSeconds": {"type": "integer", "minimum": 0},
                                "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The fields of a Deployment that the pages use. Source: Kubernetes' API reference, apps/v1."""


@of_kind("kubernetes")
def test_a_deployment_has_fields_of_kubernetes_and_commands_that_exist(block: Block, tmp_path: Path) -> None:
    document = yaml.safe_load(block.fence.text)

    jsonschema.Draft202012Validator.check_schema(DEPLOYMENT)
    jsonschema.validate(document, DEPLOYMENT)
    template = document["spec"]["template"]
    assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for container in template["spec"]["containers"]:
        parse(container["command"])
        check_variables(tmp_path, {each["name"]: each["value"] for each in container["env"]})


def starts_of(block: Block) -> Iterator[list[str]]:
    """Yield the command lines of a unit that start the program."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names have upper case letters
    unit.read_string(block.fence.text)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    yield shlex.split(unit["Service"]["ExecStart"])


@of_kind("systemd")
def test_a_unit_starts_a_command_that_exists(block: Block) -> None:
    for words in starts_of(block):
        parse(words)


@of_kind("systemd")
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(block: Block, tmp_path: Path) -> None:
    """The program and its folders are in other places here: systemd checks that the program exists."""
    [words] = starts_of(block)
    text = block.fence.text.replace(words[0], shutil.which("true") or "/bin/true")
    unit = tmp_path / "shop.service"
    unit.write_text(text, "utf-8")

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "shop.service" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@of_kind("project")
def test_the_dependencies_of_a_project_are_requirements(block: Block) -> None:
    for text in tomllib.loads(block.fence.text)["project"]["dependencies"]:
        assert Requirement(text).name == "mqtemplate"
