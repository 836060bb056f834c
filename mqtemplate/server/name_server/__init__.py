"""The name server: topic routes and registered brokers."""
