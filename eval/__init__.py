"""Measurement: acceptance, tree search, speed, losslessness, and the report."""
