"""Topics, consumer groups and users of a deployment: their names, declarations and rights."""
