"""How good is a compressed cache? Contexts with known answers, policies side by side, tables and plots."""
