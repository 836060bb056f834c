"""Celery tasks with an ETA, moved to mqtemplate: before, with one line more, and as listeners."""
