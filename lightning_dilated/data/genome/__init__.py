"""Genomes: FASTA windows and pairs of strains."""
