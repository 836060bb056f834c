"""Files of a store: mapped files, small files and tables, in a folder or in memory."""
