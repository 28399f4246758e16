"""Text in and out: tokenizer, chat template, incremental detokeniser, stop strings."""
