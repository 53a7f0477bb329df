"""Genomes: FASTA windows and pairs of strains."""

__all__: list[str] = []
