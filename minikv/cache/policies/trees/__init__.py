"""Trees of prototypes over the entries of a lane: gains of nodes, choice of nodes, merged entries."""
