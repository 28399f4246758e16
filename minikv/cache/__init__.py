"""Pages, lanes and the store that moves memory between them."""
