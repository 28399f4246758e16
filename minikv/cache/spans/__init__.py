"""SeKV: text as anchors and spans, and which spans are zoomed in (arXiv 2606.31145)."""
