"""Instruments: memory, communication, links, ranks against one rank."""
