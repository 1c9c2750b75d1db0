"""What users bring, made into what a split takes: data loaders and data modules that know nothing of clients."""
