"""The command ``lightning-fed attack``: who was in the training data, told from the model's outputs."""
