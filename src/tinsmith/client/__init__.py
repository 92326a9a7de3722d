"""The SDK: clients for training, sampling and the service's lists."""
