"""From text to token batches: corpus, tokenizer, shards on disk, order and loader."""
