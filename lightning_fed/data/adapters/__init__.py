"""Turns the user's data loaders, data modules and containers into data that can be split."""
