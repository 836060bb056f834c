"""Orders in Django: ``python -m examples.django_orders.manage migrate``, then ``runserver``."""
