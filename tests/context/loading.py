"""Types of the fixtures of the configuration tests."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.context import AppSettings

__all__ = ["Load", "Refusal"]

Load = Callable[..., AppSettings]
Refusal = Callable[..., str]
