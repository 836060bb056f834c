"""Choice of the view. It imports nothing: the data source loads the rest only for a read of pending messages."""

from __future__ import annotations

from collections.abc import Mapping

from mqtemplate.errors import ConfigurationError


def is_pending_view(options: Mapping[str, str]) -> bool:
    """Return True for ``view=pending``.

    Raises:
        ConfigurationError: The view is another one.
    """
    view = {name.lower(): value for name, value in options.items()}.get("view", "messages").strip().lower()
    if view not in ("messages", "pending"):
        raise ConfigurationError(f"option view={view!r}: allowed are 'messages', which is the default, and 'pending'")
    return view == "pending"
