"""The limit of open files and sockets of this process."""

from __future__ import annotations

__all__ = ["descriptor_limit", "raise_descriptor_limit"]

_NO_LIMIT = 1 << 30


def descriptor_limit() -> int:
    """Return the soft limit of open files and sockets (``RLIMIT_NOFILE``)."""
    try:
        import resource
    except ImportError:  # Windows
        return _NO_LIMIT
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else min(soft, _NO_LIMIT)


def raise_descriptor_limit() -> bool:
    """Raise the soft limit to the hard limit. Return False if it is there already, or the system does not allow it."""
    try:
        import resource
    except ImportError:
        return False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS: the hard limit is infinite, the kernel's own limit is not
        return False
    return True
