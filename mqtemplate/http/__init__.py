"""HTTP without a web framework: requests, responses, a server, and bridges to WSGI and ASGI.

The actuator and the dashboard are functions from a request to a response.
"""

from mqtemplate.http.exchange import HttpHandler, HttpRequest, HttpResponse

__all__ = ["HttpHandler", "HttpRequest", "HttpResponse"]
