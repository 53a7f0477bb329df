"""Commands about slides."""
