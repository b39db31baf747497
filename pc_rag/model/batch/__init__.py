"""Several requests side by side: what they share, and the passes that run them."""
