"""Whoever may train a workload: loops written by hand, the framework under its options, other frameworks."""
