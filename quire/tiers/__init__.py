"""Stores of KV blocks below the device's memory: the protocol, disk, and how the engine uses them. No torch."""
