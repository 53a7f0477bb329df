"""Write models as files that run without this package, and convert weights."""
