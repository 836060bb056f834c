"""Exit codes of the command line; docs/cli.md has them too."""

SUCCESS = 0
FAILED = 1
"""The command failed: invalid settings, no connection, a full disk, a refused request."""
USAGE = 2
"""The arguments are wrong, or a confirmation is missing."""
UNKNOWN_NAME = 3
"""A topic, group or message does not exist, or nothing matches."""
UNSUPPORTED = 4
"""This kind of broker does not support the operation."""
IN_USE = 5
"""The command changes a store directory, and another process has it open."""
DAMAGED = 6
"""``doctor`` has found damage."""
INTERRUPTED = 130
"""Ctrl-C."""
