"""gRPC over HTTP/2, server side, on the project's own I/O loop."""
