"""One model on several devices: ranks, processes that each have a part of it, in lockstep."""
