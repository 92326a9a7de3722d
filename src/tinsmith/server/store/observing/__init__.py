"""What stays of runs to be looked at: steps, their curves, and examples."""
