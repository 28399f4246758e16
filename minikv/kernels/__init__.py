"""Attention backends behind one interface, and the batch object they read."""
