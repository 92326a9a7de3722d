"""What a CPU computes in forms of its own."""
