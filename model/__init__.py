"""One decoder; the attention variant is a letter of its layer pattern."""
