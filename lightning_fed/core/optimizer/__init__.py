"""The optimizer of a client, and the step over the flat vector."""
