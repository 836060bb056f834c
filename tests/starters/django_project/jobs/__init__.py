"""An app with tasks."""
