"""The URL of the project and its view. The reminder is in the transaction of the order: both are stored, or none."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from mqtemplate_starter_django import outbox

from .orders.models import Order


def place(_request: HttpRequest, customer: str) -> JsonResponse:
    """Store an order, and a reminder that is due in three hours."""
    with transaction.atomic():
        order = Order.objects.create(customer=customer)
        outbox().send("reminders", order.pk, delay="3h")
    return JsonResponse({"order": order.pk}, status=202)


urlpatterns = [path("orders/<slug:customer>", place)]
