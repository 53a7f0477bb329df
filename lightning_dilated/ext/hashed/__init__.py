"""Hashed attention: a query reads the latest rows with its learned code, at a cost almost linear in N."""
