"""Placeholder docstring; its owner writes it."""
