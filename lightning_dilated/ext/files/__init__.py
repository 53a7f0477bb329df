"""Files that data sets read: lists of files, digests of their content, and bytes by range."""
