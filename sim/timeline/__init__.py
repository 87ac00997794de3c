"""Timelines: the trace of a world in the formats of other tools and as a picture, and what all timelines use.

export, plot -> bars
export -> perfetto
"""
