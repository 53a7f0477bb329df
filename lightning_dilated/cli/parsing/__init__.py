"""The parser of fit, validate, test and predict: short errors that name the key that was meant, and the keys of classes."""
