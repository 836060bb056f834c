"""Outbox and inbox for Django: an app for ``INSTALLED_APPS``, and their functions.

``INSTALLED_APPS = [..., "mqtemplate.outbox.django"]`` and ``manage.py migrate`` create the tables.
"""

from mqtemplate.outbox.django.boxes import DjangoInbox, DjangoInboxMiddleware, DjangoOutbox

__all__ = ["DjangoInbox", "DjangoInboxMiddleware", "DjangoOutbox"]
