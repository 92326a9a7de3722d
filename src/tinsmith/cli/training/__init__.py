"""Training from the command line: data, conversations, and the loop."""
