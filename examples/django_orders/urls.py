"""URLs of the project."""

from __future__ import annotations

from django.urls import path

from .orders.views import place

urlpatterns = [path("orders/<slug:customer>", place)]
