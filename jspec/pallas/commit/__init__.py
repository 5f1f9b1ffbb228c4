"""The commit of an accepted path, all layers in one call."""
