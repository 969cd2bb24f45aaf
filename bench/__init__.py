"""Measurements. Each file prints one report and its own command line; speeds are ratios taken in one run, interleaved.

What belongs here: scripts that drive the engine from outside and the little that they share (report, prompts, runs).
No figure is written down here: every number is measured or counted when the script runs.
"""
