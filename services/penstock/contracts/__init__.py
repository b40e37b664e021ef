"""Records and bodies: JSON on the wire, dataclasses in Python. `schemas/` is the authority; tests hold the two together."""
