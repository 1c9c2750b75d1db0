"""Files into tensors."""
