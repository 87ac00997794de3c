"""Programs played again: the allocator's memory, the streams' time, and pictures of both.

timeline -> draw -> spans -> player -> relative -> streams -> pieces
allocator
"""
