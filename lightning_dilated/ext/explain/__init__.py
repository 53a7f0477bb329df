"""Explains what patterns let a model see: walls, reach, dead residues, sight, pictures."""
