"""Compressed bodies, as a part of the protocol; `mqtemplate.compression` does the work, for stored messages too."""

from __future__ import annotations

from mqtemplate.compression import CompressionType, compress_body, compression_type, decompress_body

__all__ = ["CompressionType", "compress_body", "compression_type", "decompress_body"]
