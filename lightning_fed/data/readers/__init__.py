"""Reads files into tensors."""
