"""Timelines: a world's trace in the formats of other tools and as a picture, and the writer of all Perfetto files.

export, plot -> bars
export -> perfetto
"""
