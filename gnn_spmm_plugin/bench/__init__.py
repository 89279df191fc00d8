"""Measurements. Nothing of the package imports this."""
