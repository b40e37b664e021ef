"""Records and bodies: JSON on the wire, dataclasses in Python.

`schemas/` is the authority. Tests compare the two.
"""
