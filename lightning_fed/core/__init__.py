"""What a client trains with: the flat vector, buffers, updates, client state, optimizers, what is logged."""
