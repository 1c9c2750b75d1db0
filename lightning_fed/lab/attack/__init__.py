"""The command ``lightning-fed attack``: tells from the model's outputs which samples were in the training data."""
