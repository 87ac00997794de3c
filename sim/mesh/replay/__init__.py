"""Programs played again: the allocator's memory, the streams' time, and pictures of both.

chrome, draw -> spans -> player -> relative -> streams -> pieces -> flights
allocator, takings
"""
