"""The way of a request to its processor, and of the response to the client."""
