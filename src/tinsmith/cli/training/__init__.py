"""Training from the command line: data, conversations, methods, and the loop of all of them."""

METHOD_NAMES = ("sft", "dpo", "rl", "distill")
