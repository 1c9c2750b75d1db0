"""Commands that take the options of ``fit``, or list them."""
