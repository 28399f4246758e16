"""Conversations on disk: one file with the messages, the KV lanes and what the next turn needs of them."""
