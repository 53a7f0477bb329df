"""What patterns let a model see: walls, reach, dead residues, sight, pictures. The command `explain`; advice in a fit."""
