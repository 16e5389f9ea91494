"""The store: few files, many items, read at memory speed."""
