"""From a loaded model to proven positions: what its layers do is observed, names only propose."""
