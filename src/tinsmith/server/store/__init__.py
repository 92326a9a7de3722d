"""Where the service keeps what must outlive it. `base` is the interface, `sql` implements it."""
