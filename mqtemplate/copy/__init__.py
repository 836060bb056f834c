"""Backup of a store directory, its continuous copy to another place, and the restore to a moment."""

from mqtemplate.copy.copier import CopiedBroker

__all__ = ["CopiedBroker"]
