"""Starter of FastAPI and Starlette: a lifespan, dependencies, and routes for probes."""

from mqtemplate_starter_fastapi.messages import FastAPIMQTemplate as MQTemplate
from mqtemplate_starter_fastapi.messages import Template, depends, health_route, health_router, template

__all__ = ["MQTemplate", "Template", "depends", "health_route", "health_router", "template"]
