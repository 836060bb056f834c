"""gRPC over HTTP/2, server side, on the project's own I/O loop. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.http2.grpc_call import GrpcCall, GrpcStreamHandler
    from mqtemplate.http2.grpc_server import GrpcConnection, GrpcServer
    from mqtemplate.http2.grpc_wire import GrpcStatus
    from mqtemplate.http2.limits import GrpcLimits, Http2Limits

__all__ = [
    "GrpcCall",
    "GrpcConnection",
    "GrpcLimits",
    "GrpcServer",
    "GrpcStatus",
    "GrpcStreamHandler",
    "Http2Limits",
]

__getattr__ = late_import(
    __name__,
    {
        "GrpcCall": "mqtemplate.http2.grpc_call",
        "GrpcConnection": "mqtemplate.http2.grpc_server",
        "GrpcStatus": "mqtemplate.http2.grpc_wire",
        "GrpcStreamHandler": "mqtemplate.http2.grpc_call",
        "GrpcServer": "mqtemplate.http2.grpc_server",
        "GrpcLimits": "mqtemplate.http2.limits",
        "Http2Limits": "mqtemplate.http2.limits",
    },
)
