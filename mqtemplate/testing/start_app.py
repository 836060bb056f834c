"""Type of the fixture ``mqtemplate_app``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mqtemplate.context.application import MQApplication
from mqtemplate.context.autoconfigure import StarterSource


class StartApp(Protocol):
    """Function that starts an application over the broker, the clock and the template of the test."""

    def __call__(
        self,
        *components: object,
        config_folder: Path | str | None = None,
        profiles: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        overrides: Mapping[type, object] | None = None,
        settings: Mapping[str, object] | None = None,
        starters: Iterable[StarterSource] | None = None,
    ) -> MQApplication:
        """Start an application; the arguments are those of `MQApplication`. The end of the test stops it."""
