"""The arithmetic of placing, on arrays: exact, in ranges that fit the processor's cache."""
