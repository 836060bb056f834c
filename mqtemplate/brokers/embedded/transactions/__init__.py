"""Transactional messages of the embedded broker."""
