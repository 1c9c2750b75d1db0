"""The command that arranges runs at Weights & Biases."""
