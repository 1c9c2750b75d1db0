"""Tables and pictures over the folders of finished runs."""
