"""Text to batches: tokenizers, sources, preparation, shards, the loader, synthetic retrieval."""
