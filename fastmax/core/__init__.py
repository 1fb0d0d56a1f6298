"""Code that every part of the library shares: `Call`, score functions, checks of arguments, and warnings.

It imports nothing else of fastmax.
"""
