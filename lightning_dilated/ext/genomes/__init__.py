"""Genomes: FASTA and VCF files, windows, scores of variants."""
