"""Speculation: boundaries and capture, trees, verification, acceptance figures, drafter training.

What belongs here: what decides which rows to draft and which of them to keep. Tree code is pure tensor code with no
model in it. Modules may import `minieagle.dist` and `minieagle.models`, never the engine.
"""
