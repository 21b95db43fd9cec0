"""Nested values and their bits, and arguments that are what they must be."""
