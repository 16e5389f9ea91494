"""Columns of texts, tables of sizes, Parquet."""
