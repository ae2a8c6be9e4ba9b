from clover.parity.tiny_sdar import CONFIG, EOS, HEADS, LAYERS, LIVE, MASK, VOCAB, write_tiny_sdar  # noqa: F401
