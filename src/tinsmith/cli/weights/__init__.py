"""A checkpoint's files turned into what other programs read."""
