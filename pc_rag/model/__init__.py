"""Models: loading, encoding, and running them over stored keys and values."""
