"""Hash functions of Java and of files."""

from mqtemplate.hashes.sums import crc32, java_string_hash, tags_code

__all__ = ["crc32", "java_string_hash", "tags_code"]
