"""Ranks of one model that is split among several devices: how they reach each other, and matrices that are summed."""
