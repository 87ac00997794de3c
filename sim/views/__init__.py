"""A trace in the formats of other tools, and as a picture.

export, plot -> timeline
"""
