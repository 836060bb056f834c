"""Starter of Flask: an extension with ``init_app``, and the application context around handlers."""

from mqtemplate_starter_flask.extension import FlaskMQTemplate as MQTemplate

__all__ = ["MQTemplate"]
