"""Commands on genomes."""
