"""An adapter as files, and files as an adapter again."""
