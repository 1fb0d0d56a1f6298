"""What every part of the library shares: the call and its score function, checks of arguments, and warnings.

Imports nothing else of fastmax.
"""
