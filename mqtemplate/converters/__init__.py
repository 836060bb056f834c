"""Converters for further formats. Each one is in a module that imports its library: extras of the same names."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.converters.avro_converter import AvroConverter
    from mqtemplate.converters.content_types import ConverterByContentType
    from mqtemplate.converters.msgspec_converter import MsgspecConverter
    from mqtemplate.converters.payload_types import BodyLimits
    from mqtemplate.converters.protobuf_converter import ProtobufConverter

__all__ = ["AvroConverter", "BodyLimits", "ConverterByContentType", "MsgspecConverter", "ProtobufConverter"]

__getattr__ = late_import(
    __name__,
    {
        "AvroConverter": "mqtemplate.converters.avro_converter",
        "BodyLimits": "mqtemplate.converters.payload_types",
        "ConverterByContentType": "mqtemplate.converters.content_types",
        "MsgspecConverter": "mqtemplate.converters.msgspec_converter",
        "ProtobufConverter": "mqtemplate.converters.protobuf_converter",
    },
)
