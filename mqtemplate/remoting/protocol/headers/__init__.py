"""Headers of requests and responses, one class for each form."""
