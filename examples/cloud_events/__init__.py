"""CloudEvents over messages: a converter of one's own."""
