"""Faults of every kind, counted: what `make test-faults` runs."""
