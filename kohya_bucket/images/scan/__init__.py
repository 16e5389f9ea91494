"""Work over many files: sizes, times, hashes; alone, on threads, processes or machines."""
