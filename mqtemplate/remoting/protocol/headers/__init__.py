"""Headers of requests and responses: the fields of each command."""
