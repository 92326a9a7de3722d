"""Engines that are not children of the server: they connect to it, over TCP with mutual TLS."""
