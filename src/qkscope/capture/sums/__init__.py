"""Sums over tokens on the device: what a forward pass is reduced to."""
