"""Files that run without this package."""
