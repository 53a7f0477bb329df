"""Questions about a long context: a value is stated somewhere in filler, and asked for at the end."""
