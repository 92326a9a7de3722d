"""The client people use: ServiceClient, TrainingClient, SamplingClient, RestClient, futures.

Every operation is written once, as a coroutine that runs on the I/O thread (`uplink.loop`); the
public method returns a future at once. `uplink` is what the clients of one credential share.
"""
