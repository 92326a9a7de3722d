"""Whether a model computes what `transformers` does, asked before it is served."""
