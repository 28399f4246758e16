"""Models: where they come from, what they hold, and how their weights are read."""
