"""Which sequences compute how many rows in a step."""
