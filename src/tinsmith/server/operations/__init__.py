"""The life of an operation, from its arrival to its recorded end, and after a crash again."""
