"""Orders in Flask: ``flask --app examples.flask_orders.app run``."""
