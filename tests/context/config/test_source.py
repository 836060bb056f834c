"""Files and profiles: which are read, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.context import load_settings
from mqtemplate.errors import ConfigurationError
from tests.context.loading import Load, Refusal

_BASE = """
    rocketmq:
      name-server: embedded
      producer: {group: base, send-message-timeout: 5}
    """


def test_a_profile_changes_single_keys_and_keeps_the_others(load: Load) -> None:
    settings = load(_BASE, dev="rocketmq.producer.group: dev", profiles=["dev"])

    assert settings.rocketmq.producer.group == "dev"
    assert settings.rocketmq.producer.send_message_timeout == 5
    assert [Path(file).name for file in settings.origins.files] == ["application.yml", "application-dev.yml"]
    assert settings.origins.profiles == ("dev",)
    assert settings.origins.of("rocketmq.producer.group") == "application-dev.yml:1"


def test_a_later_profile_wins(load: Load) -> None:
    one, two = "rocketmq.producer.group: one", "rocketmq.producer.group: two"

    assert load(_BASE, one=one, two=two, profiles=["one", "two"]).rocketmq.producer.group == "two"
    assert load(_BASE, one=one, two=two, profiles=["two", "one"]).rocketmq.producer.group == "one"


def test_a_list_is_replaced_as_a_whole(load: Load) -> None:
    settings = load(
        "mqtemplate.autoconfigure.exclude: [a, b]", dev="mqtemplate.autoconfigure.exclude: [c]", profiles=["dev"]
    )

    assert settings.mqtemplate.autoconfigure.exclude == ("c",)


@pytest.mark.parametrize(
    ("profiles", "group"), [([], "not-prod"), (["dev"], "not-prod"), (["prod"], "prod"), (["test"], "not-prod")]
)
def test_a_document_of_a_file_may_apply_to_profiles_only(load: Load, profiles: list[str], group: str) -> None:
    yaml = """
        rocketmq.producer.group: base
        ---
        config.activate.on-profile: "!prod"
        rocketmq.producer.group: not-prod
        ---
        config:
          activate:
            onProfile: prod, staging
        rocketmq.producer.group: prod
        """

    assert load(yaml, profiles=profiles).rocketmq.producer.group == group


def test_spring_s_activation_key_works(load: Load) -> None:
    yaml = "a: 1\n---\nspring.config.activate.on-profile: prod\nrocketmq.producer.group: prod\n"

    assert load(yaml, profiles=["prod"]).rocketmq.producer.group == "prod"


def test_profiles_are_set_by_the_argument_else_the_environment_else_the_file(load: Load) -> None:
    def profiles(**given: object) -> tuple[str, ...]:
        return load("mqtemplate.profiles.active: [file]", **given).mqtemplate.profiles.active

    environment = {"MQTEMPLATE_PROFILES_ACTIVE": "env1, env2"}

    assert profiles() == ("file",)
    assert profiles(environment=environment) == ("env1", "env2")
    assert profiles(environment=environment, arguments={"mqtemplate.profiles.active": "key"}) == ("key",)
    assert profiles(environment=environment, profiles=["argument"]) == ("argument",)


def test_a_document_for_a_profile_cannot_activate_profiles(refusal: Refusal) -> None:
    text = refusal(dev="mqtemplate.profiles.active: prod", profiles=["dev"])

    assert text.startswith("application-dev.yml:1: mqtemplate.profiles.active cannot stand in a part that is itself")


def test_a_profile_without_file_and_document_is_reported(load: Load) -> None:
    settings = load("a: 1\n---\nconfig.activate.on-profile: prod\nb: 1", profiles=["prod", "dvv"])

    assert settings.origins.unmatched_profiles == ("dvv",)


def test_a_folder_without_files_is_allowed(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, environment={})

    assert settings.rocketmq.name_server == "embedded"
    assert settings.origins.files == ()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere' is no folder; give the one that holds application\.yml"):
        load_settings(tmp_path / "nowhere", environment={})


def test_yml_and_yaml_side_by_side_are_an_error(load: Load, tmp_path: Path) -> None:
    (tmp_path / "application.yaml").write_text("a: 1")

    with pytest.raises(ConfigurationError, match=r"has both application\.yml and application\.yaml; keep one"):
        load("a: 1")
