"""Explain which tokens attention patterns connect: walls, reach, dead residues, sight and pictures."""
