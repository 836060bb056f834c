"""Reading sends without decoding each, and answering many at once."""
