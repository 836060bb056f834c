"""Starter of FastAPI and Starlette: a lifespan, dependencies, and routes for probes."""

from mqtemplate_starter_fastapi.dependencies import Template, depends, template
from mqtemplate_starter_fastapi.health import health_route, health_router
from mqtemplate_starter_fastapi.messages import MQTemplate

__all__ = ["MQTemplate", "Template", "depends", "health_route", "health_router", "template"]
